//! Offers a sequence of requests to an endpoint and gathers what came back.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::{StreamExt, stream};
use tokio::task::JoinSet;
use workload::{Arrivals, Poisson, Prompt};

use crate::{
    client::{Answer, Ask, Client, Sampling},
    progress::Step,
};

/// A sequence of requests; every policy gets the same one.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The requests, in the order they are sent.
    pub(crate) requests: Vec<Planned>,
    /// When they are sent.
    pub(crate) arrivals: Arrivals,
    /// Seed of the arrival times.
    pub(crate) seed: u64,
}

/// One request of a plan.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    /// The prompt.
    pub(crate) prompt: Arc<Prompt>,
    /// How many tokens to generate.
    pub(crate) tokens: u32,
    /// How they are drawn.
    pub(crate) sampling: Sampling,
}

impl Plan {
    /// Draws `requests` requests from `prompts`. The seed of a request's tokens is that of `sampling` plus the request's index.
    pub(crate) fn draw(
        prompts: &[Prompt],
        mix: workload::Mix,
        requests: usize,
        max_tokens: u32,
        arrivals: Arrivals,
        sampling: Sampling,
    ) -> Result<Self, workload::SequenceError> {
        let seed = sampling.seed;
        let shared: Vec<Arc<Prompt>> = prompts.iter().cloned().map(Arc::new).collect();
        let order = workload::sequence(prompts, mix, requests, seed)?;
        let lengths = workload::output_lengths(requests, max_tokens, seed);
        let requests = order
            .into_iter()
            .zip(lengths)
            .enumerate()
            .map(|(position, (index, tokens))| Planned {
                prompt: Arc::clone(&shared[index]),
                tokens,
                sampling: sampling.of(position),
            })
            .collect();
        Ok(Self {
            requests,
            arrivals,
            seed,
        })
    }

    /// The same requests, all offered at once up to `concurrency`: for runs whose times do not count.
    pub(crate) fn closed(&self, concurrency: usize) -> Self {
        Self {
            requests: self.requests.clone(),
            arrivals: Arrivals::Closed { concurrency },
            seed: self.seed,
        }
    }
}

/// Sends the plan's requests and waits for all answers, given in the plan's order.
///
/// Dropping the future ends all requests in flight.
pub(crate) async fn run(client: &Client, plan: &Plan, step: &Step) -> Result<Vec<Result<Answer>>> {
    let origin = Instant::now();
    let mut answers: Vec<(usize, Result<Answer>)> = match plan.arrivals {
        Arrivals::Closed { concurrency } => closed(client, plan, concurrency, origin, step).await?,
        Arrivals::Open { rate } => open(client, plan, rate, origin, step).await?,
    };
    answers.sort_by_key(|&(index, _)| index);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

async fn closed(
    client: &Client,
    plan: &Plan,
    concurrency: usize,
    origin: Instant,
    step: &Step,
) -> Result<Vec<(usize, Result<Answer>)>> {
    let tasks = plan.requests.iter().enumerate().map(|(index, planned)| {
        let (client, planned) = (client.clone(), planned.clone());
        async move {
            let task = abort_on_drop(async move { one(&client, &planned, origin).await });
            (index, task.await)
        }
    });
    let mut finished = Vec::with_capacity(plan.requests.len());
    let mut stream = stream::iter(tasks).buffer_unordered(concurrency.max(1));
    while let Some((index, answer)) = stream.next().await {
        finished.push((index, answer?));
        step.advance();
    }
    Ok(finished)
}

async fn open(
    client: &Client,
    plan: &Plan,
    rate: f64,
    origin: Instant,
    step: &Step,
) -> Result<Vec<(usize, Result<Answer>)>> {
    let mut tasks = JoinSet::new();
    for ((index, planned), at) in plan
        .requests
        .iter()
        .enumerate()
        .zip(Poisson::new(rate, plan.seed)?)
    {
        let (client, planned) = (client.clone(), planned.clone());
        tasks.spawn(async move {
            tokio::time::sleep_until((origin + at).into()).await;
            (index, one(&client, &planned, origin).await)
        });
    }
    let mut finished = Vec::with_capacity(plan.requests.len());
    while let Some(done) = tasks.join_next().await {
        finished.push(done.context("a request's task ended badly")?);
        step.advance();
    }
    Ok(finished)
}

async fn one(client: &Client, planned: &Planned, origin: Instant) -> Result<Answer> {
    let ask = Ask {
        prompt: &planned.prompt.prompt,
        domain: planned.prompt.domain.as_deref(),
        tokens: planned.tokens,
        sampling: planned.sampling,
    };
    client.stream(&ask, origin).await
}

/// Runs `work` as a task of its own, so that many can run at once, and ends it when this future is dropped.
async fn abort_on_drop<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T> {
    let mut set = JoinSet::new();
    set.spawn(work);
    set.join_next()
        .await
        .context("a request's task is gone")?
        .context("a request's task ended badly")
}

/// Each answer's stay on its decode worker, for those whose worker is known.
pub(crate) fn stays<'a>(
    answers: impl IntoIterator<Item = &'a Answer>,
    worker_index: impl Fn(&str) -> Option<usize>,
) -> Vec<workload::Interval> {
    answers
        .into_iter()
        .filter_map(|answer| {
            let worker = worker_index(answer.decode.as_deref()?)?;
            Some(workload::Interval {
                worker,
                start: answer.routed,
                end: answer.timing.last_token,
            })
        })
        .collect()
}

/// How long the answers took in all: from the first request sent to the last token.
pub(crate) fn span<'a>(answers: impl IntoIterator<Item = &'a Answer>) -> Duration {
    let (mut first, mut last) = (Duration::MAX, Duration::ZERO);
    for answer in answers {
        first = first.min(answer.timing.sent);
        last = last.max(answer.timing.last_token);
    }
    last.saturating_sub(first)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use workload::{Mix, RequestTiming};

    fn answer(decode: Option<&str>, routed: u64, last: u64) -> Answer {
        let at = Duration::from_millis;
        Answer {
            tokens: vec![1],
            timing: RequestTiming {
                sent: at(routed),
                first_token: at(routed),
                last_token: at(last),
                tokens: 1,
            },
            routed: at(routed),
            decode: decode.map(str::to_owned),
        }
    }

    #[test]
    fn a_plan_is_a_function_of_its_seed() {
        let prompts: Vec<Prompt> = (0..9)
            .map(|index| Prompt {
                prompt: index.to_string(),
                domain: None,
                workload: None,
            })
            .collect();
        let draw = |seed| {
            let plan = Plan::draw(
                &prompts,
                Mix::Mixed,
                20,
                30,
                Arrivals::Closed { concurrency: 4 },
                Sampling {
                    temperature: 0.8,
                    seed,
                },
            )
            .unwrap();
            plan.requests
                .iter()
                .map(|planned| (planned.prompt.prompt.clone(), planned.tokens))
                .collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!(draw(1).iter().all(|(_, tokens)| (15..=30).contains(tokens)));
    }

    #[test]
    fn stays_and_span() {
        let answers = [
            answer(Some("a"), 5, 9),
            answer(None, 1, 3),
            answer(Some("b"), 2, 20),
            answer(Some("?"), 2, 4),
        ];
        let stays = stays(&answers, |name| {
            ["a", "b"].iter().position(|known| *known == name)
        });
        let workers: Vec<usize> = stays.iter().map(|stay| stay.worker).collect();
        assert_eq!(workers, [0, 1]);
        assert_eq!(span(&answers), Duration::from_millis(19));
        assert_eq!(span([]), Duration::ZERO);
    }
}
