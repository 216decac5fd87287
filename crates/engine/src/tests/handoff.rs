//! Blocks from one engine to another.

use super::fake::*;
use crate::*;

/// Prefills on one engine and gives what a decode side would ask for.
fn prefill(engine: &mut Engine, request: &Request) -> Vec<TokenOut> {
    let mut held = request.clone();
    held.hold_blocks = true;
    held.sampling.max_tokens = 1;
    engine.add(held).unwrap();
    drain(engine).remove(&request.id).unwrap()
}

/// Takes over on the other; gives the blocks that were sent.
fn hand_over(
    from: &mut Engine,
    to: &mut Engine,
    request: &Request,
) -> Result<usize, AdmissionError> {
    let pinned = to.pin_prefix(&request.prompt);
    let payload = from.read_held(request.id, pinned.blocks).unwrap();
    let sent = from.held(request.id).unwrap().blocks - pinned.blocks;
    assert_eq!(
        payload.len(),
        to.geometry()
            .payload_bytes(request.prompt.len(), pinned.blocks)
    );
    from.release_held(request.id);
    let mut taken = request.clone();
    taken.prefilled = Some(PrefilledBlocks {
        pin: pinned.id,
        payload,
    });
    to.add(taken).map(|()| sent)
}

#[test]
fn a_handed_over_request_goes_on_as_if_it_had_stayed() {
    let (mut p, mut d) = (engine(16, small(4, 8)), engine(16, small(4, 8)));
    for (id, len, sent) in [
        (1, 10, 3),
        (2, 10, 1),
        (3, 12, 1),
        (4, 12, 0),
        (5, 1, 1),
        (6, 17, 2),
    ] {
        let request = request(id, prompt(1, len), 5);
        let first = prefill(&mut p, &request);
        let counts = first[0].first.clone().unwrap().prompt_counts;
        assert_eq!(hand_over(&mut p, &mut d, &request), Ok(sent));
        let step = d.step();
        assert_eq!(step.stats.rows, 1);
        assert_eq!(
            step.tokens[0].first.as_ref().unwrap().cached_tokens,
            len - 1
        );
        let mut out = step.tokens;
        out.extend(drain(&mut d).remove(&request.id).unwrap());
        assert_eq!(outcome(&out), oracle(&request));
        assert_eq!(outcome(&out).prompt_counts, counts);
        assert_eq!((p.usage().blocks.used, d.usage().blocks.used), (0, 0));
    }
}

#[test]
fn wrong_payloads_leave_no_block_behind() {
    let (mut p, mut d) = (engine(16, small(4, 8)), engine(16, small(4, 8)));
    let good = request(1, prompt(1, 10), 5);
    prefill(&mut p, &good);
    let payload = p.read_held(good.id, 0).unwrap();
    // The rows begin after the header and the number of tokens.
    let row = payload.len() - 3 * (4 + d.geometry().row_bytes() + d.geometry().block_bytes) + 4;
    let set = |at: usize, value: u8| {
        let mut wrong = payload.clone();
        wrong[at] = value;
        wrong
    };
    let with_more = [&payload[..], &[0]].concat();
    let half = 88 + 3 * (4 + 48 + 32);
    let cases: Vec<(Vec<u8>, String)> = vec![
        (vec![], format!("expected a payload of {half} bytes, got 0")),
        (
            set(0, b'X'),
            "expected a payload of blocks that begins with COLOKV01".into(),
        ),
        (
            payload[..20].to_vec(),
            format!("expected a payload of {half} bytes, got 20"),
        ),
        (
            payload[..half - 1].to_vec(),
            format!("expected a payload of {half} bytes, got {}", half - 1),
        ),
        (
            with_more,
            format!("expected a payload of {half} bytes, got {}", half + 1),
        ),
        (set(8, 7), "expected blocks with layers 1, got 7".into()),
        (
            set(20, 16),
            "expected blocks with block size 4, got 16".into(),
        ),
        (
            set(43, 1),
            "expected blocks with block bytes 32, got 72057594037927968".into(),
        ),
        (
            set(44, 9),
            "expected blocks with prompt tokens 10, got 9".into(),
        ),
        (
            set(48, 1),
            "expected blocks with first block 0, got 1".into(),
        ),
        (
            set(52, 255),
            "expected blocks with number of blocks 3, got 255".into(),
        ),
        (
            set(60, !payload[60]),
            "expected blocks of this prompt and model, got blocks of another one".into(),
        ),
        (
            set(88, 3),
            "expected blocks with tokens in a signature row 4, got 3".into(),
        ),
        (
            set(row, payload[row] + 1),
            "block 0: expected the signature row to count 8 selections in layer 0, got 9".into(),
        ),
    ];
    for (payload, message) in cases {
        let pin = d.pin_prefix(&good.prompt).id;
        let mut wrong = good.clone();
        wrong.prefilled = Some(PrefilledBlocks { pin, payload });
        let error = d.add(wrong).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("handed-over blocks: {message}")),
            "{error}\n{message}"
        );
        d.check_blocks();
        assert_eq!(
            (d.usage().pinned, d.usage().blocks.used, d.has_work()),
            (0, 0, false)
        );
    }
    assert_eq!(hand_over(&mut p, &mut d, &good), Ok(3));
    assert_eq!(outcome(&drain(&mut d)[&good.id]), oracle(&good));
}

#[test]
fn pins_are_used_once() {
    let (mut p, mut d) = (engine(16, small(4, 8)), engine(16, small(4, 8)));
    let good = request(1, prompt(1, 10), 5);
    prefill(&mut p, &good);
    let pin = d.pin_prefix(&good.prompt).id;
    d.unpin(pin);
    d.unpin(pin);
    let mut wrong = good.clone();
    wrong.prefilled = Some(PrefilledBlocks {
        pin,
        payload: p.read_held(good.id, 0).unwrap(),
    });
    assert_eq!(
        d.add(wrong),
        Err(AdmissionError::Handoff(HandoffError::Pin))
    );
}

#[test]
fn held_blocks_stay_until_they_are_released() {
    let mut p = engine(4, small(4, 16));
    let first = request(1, prompt(1, 10), 1);
    prefill(&mut p, &first);
    assert_eq!(
        p.held(first.id),
        Some(HeldBlocks {
            blocks: 3,
            tokens: 10
        })
    );
    assert_eq!(
        p.add(first.clone()),
        Err(AdmissionError::DuplicateId { id: 1 })
    );
    // Another prompt does not fit beside them: it waits, and nothing spins.
    let second = request(2, prompt(2, 10), 2);
    p.add(second.clone()).unwrap();
    assert_eq!(p.step().stats.rows, 0);
    assert!(p.has_work());
    assert!(p.read_held(first.id, 4).is_err());
    p.release_held(first.id);
    assert_eq!(
        p.read_held(first.id, 0),
        Err(HandoffError::NotHeld { id: 1 })
    );
    assert_eq!(outcome(&drain(&mut p)[&second.id]), oracle(&second));
}

#[test]
fn a_prefill_that_ends_by_itself_holds_nothing() {
    let mut p = engine(4, small(4, 16));
    let mut stopping = request(1, prompt(1, 6), 1);
    stopping.sampling.stop_token_ids = (0..VOCABULARY as u32).collect();
    let out = prefill(&mut p, &stopping);
    assert_eq!(out[0].finish, Some(FinishReason::Stop));
    assert_eq!(p.held(stopping.id), None);
    assert_eq!(p.usage().blocks.used, 0);
}

#[test]
fn pins_give_way_when_nothing_else_can_run() {
    let (mut p, mut d) = (engine(16, small(4, 32)), engine(6, small(4, 32)));
    // Prompts that D knows, pinned for requests that are yet to come.
    for family in [1, 2] {
        d.add(request(family, prompt(family, 9), 1)).unwrap();
    }
    drain(&mut d);
    let pinned: Vec<_> = [1, 2].map(|family| d.pin_prefix(&prompt(family, 9))).into();
    assert_eq!(pinned.iter().map(|p| p.blocks).collect::<Vec<_>>(), [2, 2]);
    let big = request(9, prompt(3, 12), 4);
    d.add(big.clone()).unwrap();
    assert_eq!(outcome(&drain(&mut d)[&big.id]), oracle(&big));
    // The later pin lost its blocks: its request is served all the same.
    for (family, pinned) in [1, 2].into_iter().zip(pinned) {
        let mut late = request(20 + family, prompt(family, 9), 4);
        prefill(&mut p, &late);
        let payload = p.read_held(late.id, pinned.blocks).unwrap();
        p.release_held(late.id);
        late.prefilled = Some(PrefilledBlocks {
            pin: pinned.id,
            payload,
        });
        d.add(late.clone()).unwrap();
        assert_eq!(outcome(&drain(&mut d)[&late.id]), oracle(&late));
    }
}
