//! From a request's body to completions that run.

use std::sync::Arc;
use std::time::Instant;

use engine::{FirstToken, Recorded, Recording};
use experts::{ExpertCounts, PromptCounts};
use protocol::handoff::{Extras, Want};
use protocol::response::Usage;
use protocol::{ApiError, Body, Prompt, TransferParams};

use super::App;
use super::generation::{End, Generation, Piece};
use super::handoff::{self, Handoff};
use super::params::{Api, Params};
use crate::engine_thread::Work;

/// The most completions of one request, over all of its prompts.
const MAX_COMPLETIONS: usize = 1024;

/// A prompt, ready for the engine.
#[derive(Debug)]
pub(super) struct Input {
    pub(super) tokens: Vec<u32>,
    /// Its text, to be echoed; empty unless asked for.
    pub(super) echo: String,
}

/// The completions of a request, prompt by prompt: those of prompt `p` are at `p * n .. (p + 1) * n`.
pub(super) struct Job {
    pub(super) params: Params,
    pub(super) inputs: Vec<Input>,
    pub(super) generations: Vec<Generation>,
    pub(super) sends: bool,
    pub(super) want: Option<Want>,
    /// Prompt tokens that the prefill side of a handoff found in its cache.
    pub(super) handed_over_cached: Option<u32>,
}

impl Job {
    /// Reads a request, brings its blocks over if they are elsewhere, and has the engine take it in. If its blocks are to be held, `name` is
    /// what the handoff is called.
    ///
    /// # Errors
    /// Whatever is wrong with the request. Blocks that another worker holds for it are freed then.
    pub(super) async fn start(
        app: &Arc<App>,
        body: &Body,
        api: Api,
        name: Option<Arc<str>>,
        arrival: Instant,
    ) -> Result<Self, ApiError> {
        let handoff = Handoff::read(app, body)?;
        app.check_model(body)?;
        let mut params = Params::read(body, api)?;
        let want = handoff::want(body, &handoff, params.stream, &params.stop)?;
        let inputs = inputs(app, body, api, params.echo)?;
        let sends = matches!(handoff, Handoff::Send);
        if !matches!(handoff, Handoff::None) && inputs.len() != 1 {
            return Err(ApiError::unsupported(
                "prompt",
                "a handoff takes one prompt at a time",
            ));
        }
        if sends {
            check_send(&params)?;
            // The other worker makes the completions: the prompt is what counts here.
            params.n = 1;
        }
        check_completions(inputs.len(), params.n)?;
        fit_lengths(app, &mut params, &inputs)?;

        let (mut prefilled, mut handed_over_cached) = (None, None);
        if let Handoff::Receive(claim) = handoff {
            let tokens = inputs.first().map_or(&[][..], |input| &input.tokens);
            handed_over_cached = Some(claim.params().remote_prefill_cached_tokens);
            prefilled = Some(handoff::receive(app, claim, tokens).await?);
        }
        let record = want.map_or(Recording::default(), |want| Recording {
            output_counts: want.output_counts,
            gates: want.gate_probabilities || want.gate_logits,
        });
        let mut generations = Vec::new();
        for input in &inputs {
            for index in 0..params.n {
                let mut sampling = params.sampling.clone();
                // Each completion of a prompt has a random stream of its own.
                sampling.seed = sampling.seed.wrapping_add(u64::from(index));
                let running = app.engine.submit(Work {
                    prompt: input.tokens.clone(),
                    sampling,
                    record,
                    hold_blocks: sends,
                    handoff: name.clone().filter(|_| sends),
                    // The first completion brings the blocks in; the others find them.
                    prefilled: prefilled.take(),
                });
                let generation =
                    Generation::admitted(app.clone(), running, sends, &params, arrival);
                generations.push(generation.await?);
            }
        }
        Ok(Self {
            params,
            inputs,
            generations,
            sends,
            want,
            handed_over_cached,
        })
    }

    /// Runs all completions to their ends.
    ///
    /// # Errors
    /// The engine went away.
    pub(super) async fn finish(self, app: &App) -> Result<Done, ApiError> {
        let id = self.generations.first().map(Generation::id);
        let runs = self.generations.into_iter().map(Finished::collect);
        let collected = futures::future::try_join_all(runs).await?;
        let (finished, held): (Vec<_>, Vec<_>) = collected.into_iter().unzip();
        let usage = usage(
            &self.inputs,
            &finished,
            self.params.n,
            self.handed_over_cached,
        );
        let transfer = match (id, finished.first()) {
            (Some(id), Some(first)) if self.sends || self.want.is_some() => answer(
                app,
                id,
                first,
                &usage,
                self.sends,
                self.want.unwrap_or_default(),
            )?,
            _ => None,
        };
        Ok(Done {
            params: self.params,
            inputs: self.inputs,
            finished,
            usage,
            // Without parameters nobody can come for the blocks: they are freed here.
            held: held
                .into_iter()
                .flatten()
                .next()
                .filter(|_| transfer.is_some()),
            transfer,
        })
    }
}

/// A request that has run to its end.
pub(super) struct Done {
    pub(super) params: Params,
    pub(super) inputs: Vec<Input>,
    pub(super) finished: Vec<Finished>,
    pub(super) usage: Usage,
    pub(super) transfer: Option<TransferParams>,
    /// Frees the blocks that `transfer` names, unless the reply is on its way.
    pub(super) held: Option<Generation>,
}

/// A completion that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<engine::TokenLogprobs>,
    pub(super) end: End,
    first: Option<FirstToken>,
    recorded: Option<Recorded>,
}

impl Finished {
    /// The completion, and what guards its blocks where they are held for a peer.
    async fn collect(mut generation: Generation) -> Result<(Self, Option<Generation>), ApiError> {
        let (mut text, mut tokens, mut logprobs, mut first) =
            (String::new(), Vec::new(), Vec::new(), None);
        while let Some(piece) = generation.next().await {
            let Piece {
                token,
                text: more,
                logprobs: of_token,
                first: with_first,
                end,
                recorded,
            } = piece?;
            text.push_str(&more);
            tokens.push(token);
            logprobs.extend(of_token);
            first = first.or(with_first);
            if let Some(end) = end {
                let finished = Self {
                    text,
                    tokens,
                    logprobs,
                    end,
                    first,
                    recorded,
                };
                return Ok((finished, generation.holds().then_some(generation)));
            }
        }
        Err(ApiError::internal(
            "a completion ended without its last token",
        ))
    }
}

/// The tokens of a request as a whole: each prompt once, cached as its first completion found it.
fn usage(
    inputs: &[Input],
    finished: &[Finished],
    n: u32,
    handed_over_cached: Option<u32>,
) -> Usage {
    let prompt: usize = inputs.iter().map(|input| input.tokens.len()).sum();
    let completion: usize = finished.iter().map(|finished| finished.tokens.len()).sum();
    let cached = finished
        .iter()
        .step_by(n.max(1) as usize)
        .filter_map(|finished| finished.first.as_ref())
        .map(|first| first.cached_tokens)
        .sum::<usize>();
    let cached = handed_over_cached.unwrap_or(cached as u32);
    Usage::new(prompt as u32, completion as u32, cached)
}

fn answer(
    app: &App,
    id: engine::RequestId,
    finished: &Finished,
    usage: &Usage,
    sends: bool,
    want: Want,
) -> Result<Option<TransferParams>, ApiError> {
    let recorded = finished.recorded.clone().unwrap_or_default();
    let gates = recorded.gates.unwrap_or_default();
    let output = |counts: ExpertCounts| {
        PromptCounts::complete(counts)
            .map_err(|error| ApiError::internal(format!("counts of the output: {error}")))
    };
    let extras = Extras {
        prompt_counts: finished
            .first
            .as_ref()
            .map(|first| first.prompt_counts.clone()),
        output_counts: recorded.output_counts.map(output).transpose()?,
        gate_probabilities: want.gate_probabilities.then_some(gates.probabilities),
        gate_logits: want.gate_logits.then_some(gates.logits),
    };
    if !sends {
        return Ok(Some(TransferParams::of_extras(&extras)));
    }
    // One that ended by itself holds nothing: its own reply is the answer.
    if finished.end.finish != protocol::response::Finish::Length {
        return Ok(None);
    }
    handoff::reply(app, id, usage.prompt_tokens, usage.cached_tokens(), &extras).map(Some)
}

/// Refuses more completions than one request may ask for.
fn check_completions(prompts: usize, n: u32) -> Result<(), ApiError> {
    let completions = prompts.saturating_mul(n as usize);
    if completions > MAX_COMPLETIONS {
        return Err(ApiError::invalid_param(
            if n > 1 { "n" } else { "prompt" },
            format!(
                "expected at most {MAX_COMPLETIONS} completions of one request, got {prompts} prompts with `n` {n}"
            ),
        ));
    }
    Ok(())
}

/// Half of a handoff makes one token and one reply.
fn check_send(params: &Params) -> Result<(), ApiError> {
    if params.stream {
        return Err(ApiError::unsupported(
            "stream",
            "the prefill side of a handoff replies at once, with its transfer parameters",
        ));
    }
    if params.sampling.max_tokens > 1 {
        return Err(ApiError::invalid_param(
            "max_tokens",
            format!(
                "expected `max_tokens` 1 on the prefill side of a handoff, got {}",
                params.sampling.max_tokens
            ),
        ));
    }
    Ok(())
}

/// Fills in an open `max_tokens` and refuses what does not fit the context, before anything is brought over for it.
fn fit_lengths(app: &App, params: &mut Params, inputs: &[Input]) -> Result<(), ApiError> {
    let longest = inputs
        .iter()
        .map(|input| input.tokens.len())
        .max()
        .unwrap_or(0);
    let room = app.max_sequence.saturating_sub(longest);
    let wanted = params.sampling.max_tokens.max(1);
    if wanted > room {
        return Err(ApiError::context_length_exceeded(
            app.max_sequence,
            longest,
            wanted,
        ));
    }
    if params.sampling.max_tokens == 0 {
        params.sampling.max_tokens = room;
    }
    Ok(())
}

fn inputs(app: &App, body: &Body, api: Api, echo: bool) -> Result<Vec<Input>, ApiError> {
    if api == Api::Chat {
        let tokens = app.text.chat(body)?;
        return Ok(vec![Input {
            tokens,
            echo: String::new(),
        }]);
    }
    let add_special_tokens = body.bool("add_special_tokens")?.unwrap_or(true);
    let tokenized = body.prompts()?.into_iter().map(|prompt| match prompt {
        Prompt::Text(text) => Ok(Input {
            tokens: app.text.encode(&text, add_special_tokens)?,
            echo: if echo { text } else { String::new() },
        }),
        Prompt::Tokens(tokens) => Ok(Input {
            echo: if echo {
                app.text.decode(&tokens)?
            } else {
                String::new()
            },
            tokens,
        }),
    });
    tokenized.collect()
}
