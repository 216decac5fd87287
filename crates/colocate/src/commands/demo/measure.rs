//! One round of one policy: a gateway of its own, the plan's requests, what came of them.

use anyhow::{Context, Result};
use gateway::LocalityConfig;
use locality::LocalityMap;
use routing::DecodePolicyName;
use workload::{LatencySummary, RequestTiming};

use super::report::Round;
use crate::{
    client::{Answer, Client},
    cluster::Cluster,
    front::{Front, Gateway},
    load::{self, Plan},
    progress::Step,
    scrape,
};

/// A running cluster, ready to serve rounds.
pub(super) struct Bench {
    decode: Vec<Client>,
    front: Front,
}

impl Bench {
    pub(super) async fn new(
        cluster: &Cluster,
        map: LocalityMap,
        locality: LocalityConfig,
        seed: u64,
    ) -> Result<Self> {
        let decode = futures::future::try_join_all(
            cluster
                .decode
                .iter()
                .map(|worker| Client::connect(worker.url())),
        )
        .await?;
        let front = Front {
            prefill: vec![cluster.prefill.url().to_owned()],
            decode: cluster.decode_urls(),
            map: Some(map),
            locality,
            seed,
        };
        Ok(Self { decode, front })
    }

    /// Serves the plan's requests under `policy`.
    pub(super) async fn round(
        &self,
        policy: DecodePolicyName,
        plan: &Plan,
        outputs: &mut Outputs,
        bar: &Step,
    ) -> Result<Round> {
        let gateway = Gateway::start(&self.front, policy).await?;
        let client = Client::connect(gateway.url()).await?;
        let before = scrape::decoded(&self.decode).await?;
        let answers = load::run(&client, plan, bar).await?;
        let after = scrape::decoded(&self.decode).await?;
        drop(client);
        gateway.stop().await?;

        let mut failed = 0;
        let mut good: Vec<&Answer> = Vec::with_capacity(answers.len());
        for (index, answer) in answers.iter().enumerate() {
            match answer {
                Ok(answer) => {
                    outputs.compare(index, &answer.tokens);
                    good.push(answer);
                }
                Err(error) => {
                    failed += 1;
                    tracing::warn!(%policy, request = index + 1, "request failed: {error:#}");
                }
            }
        }
        let timings: Vec<RequestTiming> = good.iter().map(|answer| answer.timing).collect();
        let latency: LatencySummary = timings.iter().collect();
        let done = after - before;
        let stays = load::stays(good.iter().copied(), |url| self.front.decode_index(url));
        let tokens: usize = good.iter().map(|answer| answer.tokens.len()).sum();
        Ok(Round {
            failed,
            ttft_p50_ms: latency.ttft().p50_ms,
            tpot_p50_ms: latency.tpot().p50_ms,
            tpot_p99_ms: latency.tpot().p99_ms,
            distinct_experts: done
                .distinct_experts()
                .context("the decode workers counted no decode tokens")?,
            batch: done
                .batch()
                .context("the decode workers counted no decode steps")?,
            max_over_mean: workload::balance_over_time(&stays, self.decode.len())
                .context("the gateway did not say which decode workers it chose")?,
            tokens_per_second: tokens as f64 / load::span(good).as_secs_f64().max(1e-9),
        })
    }
}

/// The outputs that every round must give.
#[derive(Debug)]
pub(super) struct Outputs {
    expected: Vec<Vec<u32>>,
    different: usize,
}

impl Outputs {
    /// Those of one worker alone, in the plan's order.
    pub(super) fn new(expected: Vec<Vec<u32>>) -> Self {
        Self {
            expected,
            different: 0,
        }
    }

    /// Compares the output of request `index`.
    fn compare(&mut self, index: usize, tokens: &[u32]) {
        if self.expected.get(index).map(Vec::as_slice) != Some(tokens) {
            self.different += 1;
            tracing::warn!(
                request = index + 1,
                "the output differs from that of one worker alone"
            );
        }
    }

    /// Whether no output differed so far.
    pub(super) fn identical(&self) -> bool {
        self.different == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_other_token_is_enough() {
        let mut outputs = Outputs::new(vec![vec![1, 2], vec![3]]);
        outputs.compare(1, &[3]);
        assert!(outputs.identical());
        outputs.compare(0, &[1, 5]);
        assert!(!outputs.identical());
        let mut shorter = Outputs::new(vec![vec![1, 2]]);
        shorter.compare(0, &[1]);
        assert!(!shorter.identical());
    }
}
