//! What a request asks for, checked.

use engine::SamplingParams;
use protocol::{ApiError, Body, StreamOptions};
use serde_json::Value;

/// Which of the two APIs a request came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Completions,
    Chat,
}

/// What a request asks for, beside its prompt and its handoff.
#[derive(Debug, Clone)]
pub(super) struct Params {
    /// `max_tokens` is as asked; 0 where the request does not say, until the prompt's length is known.
    pub(super) sampling: SamplingParams,
    pub(super) n: u32,
    pub(super) stop: Vec<String>,
    pub(super) include_stop: bool,
    pub(super) skip_special: bool,
    pub(super) stream: bool,
    pub(super) stream_options: StreamOptions,
    pub(super) echo: bool,
    pub(super) return_token_ids: bool,
}

/// The most likeliest tokens that a request can ask for at each place.
const MAX_TOP_LOGPROBS: u32 = 20;

/// The most completions of one prompt.
const MAX_N: u32 = 128;

/// The most stop strings: each is looked for in all of the text.
const MAX_STOP: usize = 16;

/// The most tokens that end a completion: each is looked for at every token.
const MAX_STOP_TOKEN_IDS: usize = 128;

impl Params {
    /// Reads them.
    ///
    /// # Errors
    /// 400 on a wrong type or range, and on whatever would change the answer and cannot be honoured here.
    pub(super) fn read(body: &Body, api: Api) -> Result<Self, ApiError> {
        refuse_unsupported(body, api)?;
        let n = body.n()?;
        if n > MAX_N {
            return Err(out_of_range("n", &format!("at most {MAX_N}"), n));
        }
        Ok(Self {
            sampling: sampling(body, api)?,
            n,
            stop: at_most(MAX_STOP, "stop", body.stop_strings()?)?,
            include_stop: flag(body, "include_stop_str_in_output", false)?,
            skip_special: flag(body, "skip_special_tokens", true)?,
            stream: body.stream()?,
            stream_options: body.stream_options()?,
            echo: flag(body, "echo", false)?,
            return_token_ids: flag(body, "return_token_ids", false)?,
        })
    }
}

fn sampling(body: &Body, api: Api) -> Result<SamplingParams, ApiError> {
    let max_tokens = match body.max_tokens()? {
        Some(0) => return Err(out_of_range("max_tokens", "at least 1", 0)),
        Some(tokens) => tokens as usize,
        None => match api {
            Api::Completions => SamplingParams::default().max_tokens,
            Api::Chat => 0,
        },
    };
    let top_k = match body.i64("top_k")?.unwrap_or(0) {
        -1 | 0 => 0,
        k => usize::try_from(k).map_err(|_| out_of_range("top_k", "-1, 0 or more", k))?,
    };
    // Any 64-bit integer is a seed, signed or not.
    let seed = match body.get("seed").and_then(Value::as_u64) {
        Some(seed) => seed,
        None => body
            .i64("seed")?
            .map_or_else(random_seed, |seed| seed as u64),
    };
    Ok(SamplingParams {
        temperature: number(body, "temperature", 1.0)?,
        top_p: number(body, "top_p", 1.0)?,
        top_k,
        min_p: number(body, "min_p", 0.0)?,
        seed,
        max_tokens,
        min_tokens: body.count("min_tokens", 0)?.unwrap_or(0) as usize,
        ignore_eos: flag(body, "ignore_eos", false)?,
        stop_token_ids: at_most(
            MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            body.token_ids("stop_token_ids")?.unwrap_or_default(),
        )?,
        logprobs: logprobs(body, api)?,
    })
}

/// For a request without a seed: the engine itself draws no randomness.
fn random_seed() -> u64 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    // The bits that every version 4 has in common are not the same ones in both halves.
    high ^ low
}

fn logprobs(body: &Body, api: Api) -> Result<Option<usize>, ApiError> {
    let (field, top) = match api {
        Api::Completions => ("logprobs", body.count("logprobs", 0)?),
        Api::Chat => {
            let top = body.count("top_logprobs", 0)?;
            let asked = flag(body, "logprobs", false)?;
            if top.is_some_and(|top| top > 0) && !asked {
                return Err(ApiError::invalid_param(
                    "top_logprobs",
                    "`top_logprobs` is only allowed when `logprobs` is true",
                ));
            }
            ("top_logprobs", asked.then(|| top.unwrap_or(0)))
        }
    };
    match top {
        Some(top) if top > MAX_TOP_LOGPROBS => Err(out_of_range(
            field,
            &format!("at most {MAX_TOP_LOGPROBS}"),
            top,
        )),
        top => Ok(top.map(|top| top as usize)),
    }
}

/// Refuses what would change the answer and cannot be honoured. What only labels a request (`user`, `metadata`, `store`, ...) passes.
fn refuse_unsupported(body: &Body, api: Api) -> Result<(), ApiError> {
    let nonzero = |value: &Value| value.as_f64() != Some(0.0);
    let not_one = |value: &Value| value.as_f64() != Some(1.0);
    let full = |value: &Value| match value {
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    };
    let set = |value: &Value| *value != Value::Bool(false);
    let not_text = |value: &Value| value.get("type").and_then(Value::as_str) != Some("text");
    let not_none = |value: &Value| value.as_str() != Some("none");
    let not_only_text = |value: &Value| *value != serde_json::json!(["text"]);
    let any = |_: &Value| true;

    const TOOLS: &str = "this engine makes no tool calls";
    const GRAMMAR: &str = "this engine does not constrain its output";
    const PENALTY: &str = "this engine knows no penalties and biases";
    const PROMPT: &str = "this engine takes text and token ids";
    type Check<'a> = &'a dyn Fn(&Value) -> bool;
    let common: [(&str, Check<'_>, &str); 15] = [
        ("presence_penalty", &nonzero, PENALTY),
        ("frequency_penalty", &nonzero, PENALTY),
        ("repetition_penalty", &not_one, PENALTY),
        ("logit_bias", &full, PENALTY),
        ("allowed_token_ids", &any, PENALTY),
        ("bad_words", &full, PENALTY),
        ("response_format", &not_text, GRAMMAR),
        ("structured_outputs", &any, GRAMMAR),
        ("guided_json", &any, GRAMMAR),
        ("guided_regex", &any, GRAMMAR),
        ("guided_choice", &any, GRAMMAR),
        ("guided_grammar", &any, GRAMMAR),
        ("use_beam_search", &set, "this engine only samples"),
        (
            "prompt_logprobs",
            &any,
            "this engine gives log-probabilities of generated tokens only",
        ),
        ("truncate_prompt_tokens", &any, "prompts are taken whole"),
    ];
    let completions: [(&str, Check<'_>, &str); 2] = [
        ("suffix", &full, "this engine does not fill in"),
        ("prompt_embeds", &any, PROMPT),
    ];
    let chat: [(&str, Check<'_>, &str); 8] = [
        ("tools", &full, TOOLS),
        ("functions", &full, TOOLS),
        ("tool_choice", &not_none, TOOLS),
        ("function_call", &not_none, TOOLS),
        ("modalities", &not_only_text, PROMPT),
        ("audio", &any, PROMPT),
        (
            "chat_template",
            &any,
            "the model's own chat template is used",
        ),
        (
            "continue_final_message",
            &set,
            "an answer is always a new message",
        ),
    ];
    let specific: &[_] = match api {
        Api::Completions => &completions,
        Api::Chat => &chat,
    };
    for (field, changes_the_answer, why) in common.iter().chain(specific) {
        // `tool_choice: none` is how a client switches its tools off.
        let switched_off = *field == "tools"
            && body
                .get("tool_choice")
                .is_some_and(|choice| !not_none(choice));
        if !switched_off && body.get(field).is_some_and(changes_the_answer) {
            return Err(ApiError::unsupported(field, why));
        }
    }
    if api == Api::Completions {
        if flag(body, "echo", false)? && body.has("logprobs") {
            return Err(ApiError::unsupported(
                "logprobs",
                "with `echo` it would cover the prompt, and this engine gives log-probabilities of generated tokens only",
            ));
        }
        let n = body.n()?;
        if body
            .count("best_of", 1)?
            .is_some_and(|best_of| best_of != n)
        {
            return Err(ApiError::unsupported(
                "best_of",
                "all completions are returned: it must equal `n`",
            ));
        }
    }
    Ok(())
}

fn flag(body: &Body, field: &str, default: bool) -> Result<bool, ApiError> {
    Ok(body.bool(field)?.unwrap_or(default))
}

fn number(body: &Body, field: &str, default: f32) -> Result<f32, ApiError> {
    Ok(body.f64(field)?.map_or(default, |number| number as f32))
}

fn at_most<T>(limit: usize, field: &str, items: Vec<T>) -> Result<Vec<T>, ApiError> {
    if items.len() > limit {
        return Err(ApiError::invalid_param(
            field,
            format!(
                "expected at most {limit} items in `{field}`, got {}",
                items.len()
            ),
        ));
    }
    Ok(items)
}

fn out_of_range(field: &str, expected: &str, got: impl std::fmt::Display) -> ApiError {
    ApiError::invalid_param(
        field,
        format!("expected `{field}` to be {expected}, got {got}"),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(api: Api, text: &str) -> Result<Params, ApiError> {
        Params::read(&Body::parse(text.as_bytes()).unwrap(), api)
    }

    #[test]
    fn defaults_are_openais() {
        let params = read(Api::Completions, "{}").unwrap();
        assert_eq!(
            (params.sampling.temperature, params.sampling.top_p),
            (1.0, 1.0)
        );
        assert_eq!((params.sampling.max_tokens, params.n), (16, 1));
        assert_eq!(params.sampling.logprobs, None);
        let chat = read(Api::Chat, "{}").unwrap();
        assert_eq!(chat.sampling.max_tokens, 0);
    }

    #[test]
    fn sampling_is_read() {
        let text = r#"{"temperature":0.5,"top_p":0.9,"top_k":-1,"min_p":0.1,"seed":-3,"max_tokens":7,"min_tokens":2,
            "ignore_eos":true,"stop_token_ids":[5],"stop":["a"],"logprobs":3,"n":2}"#;
        let params = read(Api::Completions, text).unwrap();
        let sampling = params.sampling;
        assert_eq!(
            (
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                sampling.min_p
            ),
            (0.5, 0.9, 0, 0.1)
        );
        assert_eq!(
            (sampling.seed, sampling.max_tokens, sampling.min_tokens),
            (-3i64 as u64, 7, 2)
        );
        assert!(sampling.ignore_eos);
        assert_eq!(sampling.stop_token_ids, [5]);
        assert_eq!(sampling.logprobs, Some(3));
        assert_eq!((params.stop, params.n), (vec!["a".to_owned()], 2));
        let chat = read(
            Api::Chat,
            r#"{"logprobs":true,"top_logprobs":2,"max_completion_tokens":4}"#,
        )
        .unwrap();
        assert_eq!(
            (chat.sampling.logprobs, chat.sampling.max_tokens),
            (Some(2), 4)
        );
        assert_eq!(
            read(Api::Chat, r#"{"logprobs":true}"#)
                .unwrap()
                .sampling
                .logprobs,
            Some(0)
        );
    }

    #[test]
    fn any_64_bit_integer_is_a_seed() {
        for (text, seed) in [
            ("0", 0),
            ("-9223372036854775808", 1 << 63),
            ("9223372036854775808", 1 << 63),
            ("18446744073709551615", u64::MAX),
            ("-1", u64::MAX),
        ] {
            let params = read(Api::Chat, &format!(r#"{{"seed":{text}}}"#)).unwrap();
            assert_eq!(params.sampling.seed, seed, "{text}");
        }
        for text in ["18446744073709551616", "1.5", r#""1""#] {
            let error = read(Api::Chat, &format!(r#"{{"seed":{text}}}"#)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("seed"), "{text}");
        }
    }

    #[test]
    fn wrong_values_are_named() {
        for (api, text, param) in [
            (Api::Completions, r#"{"max_tokens":0}"#, "max_tokens"),
            (Api::Completions, r#"{"top_k":-2}"#, "top_k"),
            (Api::Completions, r#"{"n":0}"#, "n"),
            (Api::Completions, r#"{"n":1000}"#, "n"),
            (Api::Completions, r#"{"temperature":"hot"}"#, "temperature"),
            (Api::Completions, r#"{"logprobs":21}"#, "logprobs"),
            (Api::Chat, r#"{"top_logprobs":2}"#, "top_logprobs"),
            (Api::Chat, r#"{"logprobs":3}"#, "logprobs"),
            (
                Api::Completions,
                r#"{"stop_token_ids":"x"}"#,
                "stop_token_ids",
            ),
        ] {
            let error = read(api, text).unwrap_err();
            assert_eq!(
                (error.param.as_deref(), error.status.as_u16()),
                (Some(param), 400),
                "{text}"
            );
        }
    }

    #[test]
    fn stops_are_limited() {
        for (field, item, limit) in [
            ("stop", r#""x""#, MAX_STOP),
            ("stop_token_ids", "5", MAX_STOP_TOKEN_IDS),
        ] {
            let text = |count| format!(r#"{{"{field}":[{}]}}"#, vec![item; count].join(","));
            read(Api::Chat, &text(limit)).unwrap();
            let error = read(Api::Chat, &text(limit + 1)).unwrap_err();
            assert_eq!(
                (error.param.as_deref(), error.status.as_u16()),
                (Some(field), 400)
            );
        }
    }

    #[test]
    fn what_would_change_the_answer_is_refused_and_labels_pass() {
        for (api, text, param) in [
            (Api::Completions, r#"{"suffix":"x"}"#, "suffix"),
            (Api::Completions, r#"{"best_of":2}"#, "best_of"),
            (
                Api::Completions,
                r#"{"echo":true,"logprobs":1}"#,
                "logprobs",
            ),
            (Api::Completions, r#"{"logit_bias":{"5":1}}"#, "logit_bias"),
            (
                Api::Completions,
                r#"{"presence_penalty":0.1}"#,
                "presence_penalty",
            ),
            (
                Api::Completions,
                r#"{"use_beam_search":true}"#,
                "use_beam_search",
            ),
            (
                Api::Chat,
                r#"{"response_format":{"type":"json_object"}}"#,
                "response_format",
            ),
            (Api::Chat, r#"{"tools":[{"type":"function"}]}"#, "tools"),
            (Api::Chat, r#"{"tool_choice":"auto"}"#, "tool_choice"),
        ] {
            let error = read(api, text).unwrap_err();
            assert_eq!(error.code.as_deref(), Some(ApiError::UNSUPPORTED), "{text}");
            assert_eq!(error.param.as_deref(), Some(param), "{text}");
        }
        for (api, text) in [
            (
                Api::Completions,
                r#"{"presence_penalty":0,"repetition_penalty":1.0,"logit_bias":{},"suffix":null,"best_of":1,"user":"u"}"#,
            ),
            (
                Api::Chat,
                r#"{"tools":[{"type":"function"}],"tool_choice":"none","store":true,"metadata":{"a":"b"}}"#,
            ),
            (
                Api::Chat,
                r#"{"response_format":{"type":"text"},"tools":[],"modalities":["text"],"parallel_tool_calls":true}"#,
            ),
        ] {
            read(api, text).unwrap();
        }
    }
}
