//! A small client of the OpenAI completions route, with the clock that measures it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use futures::StreamExt;
use protocol::{
    ApiError,
    handoff::{Extras, TransferParams, Want},
    response::{Completion, ModelList},
    sse::Parser,
};
use serde_json::json;
use workload::RequestTiming;

/// How long a worker or a gateway may take to accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Sends requests to one server.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    model: String,
}

/// How tokens are drawn. A request's tokens are a function of its prompt, temperature and seed alone, so they can be compared between runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    /// 0 takes the likeliest token every time.
    pub(crate) temperature: f64,
    /// Seed of the draws.
    pub(crate) seed: u64,
}

impl Sampling {
    /// The temperature unless told: taking the likeliest token lets small models go round in circles, which no served traffic does.
    pub(crate) const DEFAULT_TEMPERATURE: f64 = 0.8;

    /// Reads a temperature from the command line.
    pub(crate) fn temperature(text: &str) -> Result<f64, String> {
        match text.parse() {
            Ok(temperature) if (0.0..=100.0).contains(&temperature) => Ok(temperature),
            _ => Err("expected a number from 0 to 100".into()),
        }
    }

    /// The sampling of the `index`-th of many requests: each draws from a seed of its own.
    pub(crate) fn of(self, index: usize) -> Self {
        Self {
            seed: self.seed.wrapping_add(index as u64),
            ..self
        }
    }
}

/// One completion to ask for.
#[derive(Debug, Clone)]
pub(crate) struct Ask<'a> {
    /// The prompt.
    pub(crate) prompt: &'a str,
    /// The label for the `domain` policy.
    pub(crate) domain: Option<&'a str>,
    /// How many tokens to generate; the end-of-sequence token does not stop it.
    pub(crate) tokens: u32,
    /// How they are drawn.
    pub(crate) sampling: Sampling,
}

/// What came back of a streamed completion.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// The ids of the generated tokens.
    pub(crate) tokens: Vec<u32>,
    /// When it was sent and answered, since the origin given.
    pub(crate) timing: RequestTiming,
    /// When its decode worker had been chosen: when the gateway's headers came.
    pub(crate) routed: Duration,
    /// The decode worker that the gateway named, where it did.
    pub(crate) decode: Option<String>,
}

impl Client {
    /// A client of the server at `base`, for the first model that it serves.
    pub(crate) async fn connect(base: &str) -> Result<Self> {
        // Fails only when another provider is there already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            // Workers and gateways are reached directly, whatever proxy the machine uses for the outside.
            .no_proxy()
            .connect_timeout(CONNECT_LIMIT)
            .pool_max_idle_per_host(256)
            .build()
            .context("cannot make an HTTP client")?;
        let base = base.trim_end_matches('/').to_owned();
        let url = format!("{base}/v1/models");
        let reply = http
            .get(&url)
            .send()
            .await
            .map_err(flat)
            .with_context(|| format!("cannot reach {url}"))?;
        let status = reply.status();
        let bytes = reply
            .bytes()
            .await
            .map_err(flat)
            .with_context(|| format!("cannot read {url}"))?;
        if !status.is_success() {
            bail!("{url}: {}", describe(status, &bytes));
        }
        let models: ModelList = serde_json::from_slice(&bytes)
            .with_context(|| format!("{url} did not answer with a list of models"))?;
        let model = models.data.into_iter().next().map(|card| card.id);
        let model = model.with_context(|| format!("{url} lists no model"))?;
        Ok(Self { http, base, model })
    }

    /// The name of the model that is served.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Asks for a completion as a stream, and measures it against `origin`.
    pub(crate) async fn stream(&self, ask: &Ask<'_>, origin: Instant) -> Result<Answer> {
        let body = json!({
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.tokens,
            "temperature": ask.sampling.temperature,
            "seed": ask.sampling.seed,
            "ignore_eos": true,
            "stream": true,
            "return_token_ids": true,
        });
        let sent = origin.elapsed();
        let reply = self.post(&body, ask.domain).await?;
        let routed = origin.elapsed();
        let status = reply.status();
        if !status.is_success() {
            let bytes = reply.bytes().await.map_err(flat)?;
            bail!("{}", describe(status, &bytes));
        }
        let decode = reply
            .headers()
            .get("x-colocate-decode")
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned);
        let (mut first_token, mut last_token) = (None, routed);
        let mut tokens = Vec::with_capacity(ask.tokens as usize);
        let mut parser = Parser::default();
        let mut pieces = reply.bytes_stream();
        let mut done = false;
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(flat).context("the stream broke")?;
            for event in parser.push(&piece)? {
                if event.is_done() {
                    done = true;
                    continue;
                }
                let new = token_ids(&event.data)?;
                if !new.is_empty() {
                    last_token = origin.elapsed();
                    first_token.get_or_insert(last_token);
                    tokens.extend(new);
                }
            }
        }
        if !done {
            bail!(
                "the stream ended before [DONE], after {} tokens",
                tokens.len()
            );
        }
        let timing = RequestTiming {
            sent,
            first_token: first_token.context("the stream held no tokens")?,
            last_token,
            tokens: tokens.len() as u32,
        };
        Ok(Answer {
            tokens,
            timing,
            routed,
            decode,
        })
    }

    /// Runs a prompt on a worker for its expert counts and gate sums.
    pub(crate) async fn counts(&self, ask: &Ask<'_>) -> Result<Extras> {
        let mut body = protocol::Body::parse(
            json!({
                "model": self.model,
                "prompt": ask.prompt,
                "max_tokens": ask.tokens,
                "temperature": ask.sampling.temperature,
                "seed": ask.sampling.seed,
                "stream": false,
            })
            .to_string()
            .as_bytes(),
        )?;
        Want::ALL.ask(&mut body);
        let reply = self.post(body.as_map(), None).await?;
        let status = reply.status();
        let bytes = reply.bytes().await.map_err(flat)?;
        if !status.is_success() {
            bail!("{}", describe(status, &bytes));
        }
        let reply: serde_json::Value =
            serde_json::from_slice(&bytes).context("the worker did not answer with JSON")?;
        let extras = TransferParams::of_reply(&reply)
            .and_then(|mut params| params.take_extras())
            .context("the worker's reply holds no expert counts: calibration needs a worker that records them")?;
        Ok(Extras::read(&extras)?)
    }

    /// The server's metrics, in Prometheus' text form.
    pub(crate) async fn metrics(&self) -> Result<String> {
        let url = format!("{}/metrics", self.base);
        let reply = self
            .http
            .get(&url)
            .send()
            .await
            .map_err(flat)
            .with_context(|| format!("cannot reach {url}"))?;
        reply
            .text()
            .await
            .map_err(flat)
            .with_context(|| format!("cannot read {url}"))
    }

    async fn post(
        &self,
        body: &impl serde::Serialize,
        domain: Option<&str>,
    ) -> Result<reqwest::Response> {
        let mut request = self
            .http
            .post(format!("{}/v1/completions", self.base))
            .json(body);
        if let Some(domain) = domain {
            request = request.header("x-colocate-domain", domain);
        }
        request
            .send()
            .await
            .map_err(flat)
            .with_context(|| format!("cannot reach {}", self.base))
    }
}

/// The generated tokens' ids in one chunk of a stream.
fn token_ids(data: &str) -> Result<Vec<u32>> {
    let chunk: serde_json::Value =
        serde_json::from_str(data).with_context(|| format!("a chunk is not JSON: {data}"))?;
    if let Some(error) = chunk.get("error") {
        bail!("the stream carried an error: {error}");
    }
    let chunk: Completion = serde_json::from_value(chunk).context("a chunk is no completion")?;
    Ok(chunk
        .choices
        .into_iter()
        .next()
        .and_then(|choice| choice.token_ids)
        .unwrap_or_default())
}

fn describe(status: reqwest::StatusCode, body: &[u8]) -> String {
    format!("{status}: {}", ApiError::from_reply(status, body).message)
}

/// reqwest's own message says little; its causes say what happened.
fn flat(error: reqwest::Error) -> anyhow::Error {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        text = inner.to_string();
        cause = inner.source();
    }
    anyhow!(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn chunks_give_their_tokens() {
        let chunk = |choices: &str| {
            format!(
                r#"{{"id":"c","object":"text_completion","created":1,"model":"m","choices":{choices}}}"#
            )
        };
        let one = chunk(
            r#"[{"index":0,"text":"a","logprobs":null,"finish_reason":null,"token_ids":[5,6]}]"#,
        );
        assert_eq!(token_ids(&one).unwrap(), [5, 6]);
        assert!(token_ids(&chunk("[]")).unwrap().is_empty());
        assert!(token_ids("{").is_err());
        let error = token_ids(r#"{"error":{"message":"peer gone"}}"#)
            .unwrap_err()
            .to_string();
        assert!(error.contains("peer gone"), "{error}");
    }
}
