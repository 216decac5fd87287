//! Anything in any order, with few blocks: every request ends as it would alone, and no block is lost.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::fake::*;
use crate::*;

#[derive(Debug, Clone)]
enum Op {
    /// A request for one engine as a whole.
    Add {
        side: usize,
        draft: Draft,
    },
    /// A request that is prefilled on side 0.
    Prefill(Draft),
    /// Pins the prompt of a held request on side 1.
    Pin(usize),
    /// Reads and releases a pinned request's blocks, and adds it on side 1.
    Take(usize),
    Unpin(usize),
    Release(usize),
    Abort {
        side: usize,
        nth: usize,
    },
    Step {
        side: usize,
        times: usize,
    },
}

#[derive(Debug, Clone)]
struct Draft {
    family: u64,
    len: usize,
    max_tokens: usize,
    sampled: bool,
    eos: bool,
    output_counts: bool,
    gates: bool,
}

fn draft() -> impl Strategy<Value = Draft> {
    (
        0u64..3,
        1usize..26,
        1usize..14,
        any::<[bool; 3]>(),
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |(family, len, max_tokens, [sampled, eos, output_counts], gates)| Draft {
                family,
                len,
                max_tokens,
                sampled,
                eos,
                output_counts,
                gates,
            },
        )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0usize..2, draft()).prop_map(|(side, draft)| Op::Add { side, draft }),
        4 => draft().prop_map(Op::Prefill),
        4 => (0usize..8).prop_map(Op::Pin),
        4 => (0usize..8).prop_map(Op::Take),
        1 => (0usize..8).prop_map(Op::Unpin),
        1 => (0usize..8).prop_map(Op::Release),
        1 => (0usize..2, 0usize..8).prop_map(|(side, nth)| Op::Abort { side, nth }),
        8 => (0usize..2, 1usize..5).prop_map(|(side, times)| Op::Step { side, times }),
    ]
}

struct World {
    sides: [Engine; 2],
    next: u64,
    /// Requests in each engine.
    alive: [Vec<Request>; 2],
    out: [BTreeMap<RequestId, Vec<TokenOut>>; 2],
    /// Prefilled and held on side 0.
    held: Vec<Request>,
    /// Pinned on side 1 for a request in `held`.
    pinned: Vec<(Request, Pinned)>,
    preemptions: u64,
}

impl World {
    fn request(&mut self, draft: &Draft) -> Request {
        self.next += 1;
        let mut request = request(self.next, prompt(draft.family, draft.len), draft.max_tokens);
        request.sampling.ignore_eos = !draft.eos;
        if draft.sampled {
            request.sampling.temperature = 0.8;
            request.sampling.seed = self.next % 3;
            request.sampling.top_p = 0.9;
        }
        request.record.output_counts = draft.output_counts;
        request.record.gates = draft.gates;
        request
    }

    fn add(&mut self, side: usize, request: Request) {
        self.sides[side].add(request.clone()).unwrap();
        self.alive[side].push(request);
    }

    fn step(&mut self, side: usize) -> usize {
        let step = self.sides[side].step();
        self.preemptions += step.stats.preempted as u64;
        assert_eq!(
            step.stats.rows,
            step.stats.prefill_tokens + step.stats.decode_tokens
        );
        assert_eq!(step.stats.generated_tokens, step.tokens.len());
        for token in step.tokens {
            let (id, finish) = (token.id, token.finish);
            self.out[side].entry(id).or_default().push(token);
            if finish.is_some() {
                let at = self.alive[side].iter().position(|r| r.id == id).unwrap();
                let mut request = self.alive[side].remove(at);
                let out = self.out[side].remove(&id).unwrap();
                assert_eq!(
                    outcome(&out),
                    oracle(&request),
                    "request {id} on side {side}"
                );
                assert_eq!(
                    self.sides[side].held(id).is_some(),
                    request.hold_blocks && finish == Some(FinishReason::Length)
                );
                if self.sides[side].held(id).is_some() {
                    request.hold_blocks = false;
                    self.held.push(request);
                }
            }
        }
        step.stats.rows
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Add { side, draft } => {
                let request = self.request(draft);
                self.add(*side, request);
            }
            Op::Prefill(draft) => {
                let mut request = self.request(draft);
                request.record = Recording::default();
                request.hold_blocks = true;
                request.sampling.max_tokens = 1;
                self.add(0, request);
            }
            Op::Pin(nth) if *nth < self.held.len() => {
                let request = self.held.remove(*nth);
                let pinned = self.sides[1].pin_prefix(&request.prompt);
                self.pinned.push((request, pinned));
            }
            Op::Take(nth) if *nth < self.pinned.len() => {
                let (mut request, pinned) = self.pinned.remove(*nth);
                let payload = self.sides[0].read_held(request.id, pinned.blocks).unwrap();
                self.sides[0].release_held(request.id);
                request.prefilled = Some(PrefilledBlocks {
                    pin: pinned.id,
                    payload,
                });
                request.sampling.max_tokens = 9;
                request.record.output_counts = true;
                self.add(1, request);
            }
            Op::Unpin(nth) if *nth < self.pinned.len() => {
                let (request, pinned) = self.pinned.remove(*nth);
                self.sides[1].unpin(pinned.id);
                self.held.push(request);
            }
            Op::Release(nth) if *nth < self.held.len() => {
                let request = self.held.remove(*nth);
                self.sides[0].release_held(request.id);
            }
            Op::Abort { side, nth } if *nth < self.alive[*side].len() => {
                let request = self.alive[*side].remove(*nth);
                self.sides[*side].abort(request.id);
                self.out[*side].remove(&request.id);
            }
            Op::Step { side, times } => {
                for _ in 0..*times {
                    self.step(*side);
                }
            }
            _ => {}
        }
        self.sides.iter().for_each(Engine::check_blocks);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_as_it_would_alone(
        ops in prop::collection::vec(op(), 1..120),
        blocks in (10usize..24, 10usize..24),
        seqs in 1usize..6,
        batched in 6usize..40,
    ) {
        let config = small(seqs, batched);
        let mut world = World {
            sides: [engine(blocks.0, config), engine(blocks.1, config)],
            next: 0,
            alive: Default::default(),
            out: Default::default(),
            held: Vec::new(),
            pinned: Vec::new(),
            preemptions: 0,
        };
        for op in &ops {
            world.apply(op);
        }
        // Pins wait on: whoever can run must run all the same. Held blocks do not give way.
        let mut steps = 0;
        for side in [1, 0] {
            while world.sides[side].has_work() {
                let rows = world.step(side);
                prop_assert!(side == 0 || rows > 0, "nothing runs: {:?}", world.sides[side].usage());
                while rows == 0 && let Some(request) = world.held.pop() {
                    world.sides[0].release_held(request.id);
                }
                while rows == 0 && side == 0 && let Some((request, pinned)) = world.pinned.pop() {
                    world.sides[0].abort(request.id);
                    world.sides[1].unpin(pinned.id);
                }
                world.sides.iter().for_each(Engine::check_blocks);
                steps += 1;
                prop_assert!(steps < 20_000, "no end: {:?}", world.sides[side].usage());
            }
        }
        for request in std::mem::take(&mut world.held) {
            world.sides[0].release_held(request.id);
        }
        for (request, pinned) in std::mem::take(&mut world.pinned) {
            world.sides[0].release_held(request.id);
            world.sides[1].unpin(pinned.id);
        }
        for side in &world.sides {
            side.check_blocks();
            let usage = side.usage();
            prop_assert_eq!(usage.blocks.used, 0);
            prop_assert_eq!((usage.held, usage.pinned, usage.running, usage.waiting), (0, 0, 0, 0));
        }
    }
}
