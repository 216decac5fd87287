//! Chat templates, as transformers renders them.

use minijinja::syntax::SyntaxConfig;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectExt};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value as Jinja};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::TokenizerError;

/// What a chat is rendered with, beside its messages.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// Whether the text ends with the beginning of the assistant's next message.
    pub add_generation_prompt: bool,
    /// Tool definitions, a JSON array, or null.
    pub tools: Value,
    /// More variables for the template (`chat_template_kwargs`).
    pub variables: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            tools: Value::Null,
            variables: Map::new(),
        }
    }
}

const NAME: &str = "chat_template";

/// A parsed template and the special tokens that it may name.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    tokens: Vec<(&'static str, String)>,
}

impl ChatTemplate {
    pub(super) fn new(source: String, tokens: Vec<(&'static str, String)>) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| e.to_string())?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| describe(&error))?;
        Ok(Self {
            environment,
            tokens,
        })
    }

    pub(super) fn render(
        &self,
        messages: &Value,
        options: &ChatOptions,
    ) -> Result<String, TokenizerError> {
        let mut variables = Map::new();
        for (name, text) in &self.tokens {
            variables.insert((*name).to_owned(), json!(text));
        }
        for (name, value) in &options.variables {
            variables.insert(name.clone(), value.clone());
        }
        variables.insert("messages".to_owned(), messages.clone());
        variables.insert(
            "add_generation_prompt".to_owned(),
            json!(options.add_generation_prompt),
        );
        if !options.tools.is_null() {
            variables.insert("tools".to_owned(), options.tools.clone());
        }
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(jinja(Value::Object(variables))));
        rendered.map_err(|error| TokenizerError::ChatTemplate(describe(&error)))
    }
}

/// The innermost reason, with the line where there is one.
fn describe(error: &Error) -> String {
    let reason = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{reason} (line {line})"),
        None => reason,
    }
}

fn raise_exception(message: &str) -> Result<Jinja, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

fn jinja(value: Value) -> Jinja {
    match value {
        Value::Null => Jinja::from(()),
        Value::Bool(value) => Jinja::from(value),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(integer), _, _) => Jinja::from(integer),
            (_, Some(integer), _) => Jinja::from(integer),
            (_, _, float) => Jinja::from(float.unwrap_or(f64::NAN)),
        },
        Value::String(text) => Jinja::from(text),
        Value::Array(values) => values.into_iter().map(jinja).collect::<Vec<_>>().into(),
        Value::Object(fields) => Jinja::from_object(Fields(
            fields
                .into_iter()
                .map(|(name, value)| (name, jinja(value)))
                .collect(),
        )),
    }
}

/// A JSON object whose fields stay in their order, as Python's do: tool definitions are shown to the model.
#[derive(Debug)]
struct Fields(Vec<(String, Jinja)>);

impl Object for Fields {
    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        let key = key.as_str()?;
        self.0
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|fields| {
            Box::new(fields.0.iter().map(|(name, _)| Jinja::from(name.as_str())))
        })
    }
}

/// As transformers does it: Python's separators, no escapes for HTML, non-ASCII text as it is.
#[allow(clippy::needless_pass_by_value)] // a filter's keyword arguments come by value
fn to_json(value: &Jinja, options: Kwargs) -> Result<Jinja, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut out, formatter,
            ))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut out, Spaced,
        )),
    };
    written
        .map_err(|error| error.to_string())
        .and_then(|()| String::from_utf8(out).map_err(|error| error.to_string()))
        .map(Jinja::from)
        .map_err(|reason| Error::new(ErrorKind::InvalidOperation, format!("tojson: {reason}")))
}

/// `{"a": 1, "b": [2, 3]}`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
