use super::wire::crc32;
use super::*;
use proptest::prelude::*;

/// From one place in a trace to the next that is tried: every one, but for an interpreter's sake.
const STEP: usize = if cfg!(miri) { 41 } else { 1 };

fn header() -> TraceHeader {
    TraceHeader {
        model: "tiny".to_owned(),
        architecture: "toy".to_owned(),
        dense_bytes: 77,
        shape: ModelShape::new(vec![4, 300], vec![10, 20], vec![2, 1]).unwrap(),
    }
}

fn encoded(tokens: usize) -> Vec<u8> {
    let mut encoder = TraceEncoder::new(&header()).unwrap();
    let mut bytes = Vec::new();
    for token in 0..tokens {
        let wide = u32::try_from(token).unwrap() % 300;
        let phase = if token % 3 == 0 {
            Phase::Prefill
        } else {
            Phase::Decode
        };
        encoder
            .push(phase, &[wide % 4, (wide + 1) % 4, 4 + wide])
            .unwrap();
        bytes.extend(encoder.take());
    }
    bytes.extend(encoder.finish());
    bytes
}

#[test]
fn what_goes_in_comes_out() {
    let sizes: &[usize] = if cfg!(miri) {
        &[0, 1, 60]
    } else {
        &[0, 1, 1024, 1025, 3000]
    };
    for &tokens in sizes {
        let trace = Trace::decode(&encoded(tokens)).unwrap();
        assert_eq!(trace.header, header());
        assert_eq!(trace.tokens(), tokens);
        if tokens > 1 {
            assert_eq!(trace.token(1), [1, 2, 5]);
            assert_eq!(
                (trace.phase(0), trace.phase(1)),
                (Phase::Prefill, Phase::Decode)
            );
        }
    }
}

#[test]
fn prompts_and_ticks_stand_where_they_were_recorded() {
    let tick = Tick {
        now: crate::Moment { ns: 5 },
        host: None,
        cgroup: None,
        pressure: None,
        locks: crate::LockLimits {
            memlock_bytes: Some(9),
            locked_elsewhere_bytes: 0,
            map_budget_bytes: None,
        },
        faults: None,
        engine: Some(crate::EngineTotals {
            hits: 7,
            ..crate::EngineTotals::default()
        }),
        held: crate::Held::default(),
        decision: crate::Decision::default(),
    };
    let mut encoder = TraceEncoder::new(&header()).unwrap();
    encoder.prompt("one").unwrap();
    encoder.push(Phase::Decode, &[0, 1, 4]).unwrap();
    encoder.tick(&tick).unwrap();
    encoder.prompt("").unwrap();
    encoder.push(Phase::Decode, &[1, 2, 5]).unwrap();
    assert!(encoder.prompt(&"x".repeat(70_000)).is_err());
    let trace = Trace::decode(&encoder.compact().finish()).unwrap();
    assert_eq!(trace.prompts(), [(0, "one".to_owned()), (1, String::new())]);
    assert_eq!(trace.ticks(), [(1, tick)]);
    assert_eq!(trace.tokens(), 2);
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let whole = encoded(20);
    for at in (0..whole.len()).step_by(STEP) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        assert!(Trace::decode(&damaged).is_err(), "flip at {at}");
    }
    let header_bytes = encoded(0).len();
    let lens = (0..whole.len()).step_by(STEP);
    for len in lens.filter(|&len| len != header_bytes) {
        assert!(Trace::decode(&whole[..len]).is_err(), "cut at {len}");
    }
}

#[test]
fn a_crash_costs_no_more_than_the_last_block() {
    let mut encoder = TraceEncoder::new(&header()).unwrap();
    let mut ends = vec![];
    let mut bytes = vec![];
    for block in 0..4 {
        for token in 0..10 {
            encoder
                .push(Phase::Decode, &[token % 4, (token + 1) % 4, 4 + block])
                .unwrap();
        }
        encoder.flush();
        bytes.extend(encoder.take());
        ends.push(bytes.len());
    }
    for cut in (ends[0]..bytes.len()).step_by(STEP) {
        let (trace, ended) = Trace::recover(&bytes[..cut]).unwrap();
        let whole = ends.iter().filter(|&&end| end <= cut).count();
        assert_eq!(trace.tokens(), 10 * whole, "cut at {cut}");
        assert_eq!(ended.is_none(), ends.contains(&cut));
        if let Some(error) = ended {
            assert!(
                error
                    .to_string()
                    .contains(&format!("offset {}", ends[whole - 1])),
                "{error}"
            );
        }
    }
}

#[test]
fn a_trace_may_come_in_pieces_of_any_size() {
    let whole = encoded(if cfg!(miri) { 30 } else { 3000 });
    let expected = Trace::decode(&whole).unwrap();
    for size in [1, 7, 1000, 100_000] {
        let mut decoder = TraceDecoder::default();
        let mut trace = Trace::empty(header());
        for piece in whole.chunks(size) {
            decoder.feed(piece);
            if matches!(decoder.header(), Err(TraceError::Truncated { .. })) {
                continue;
            }
            while decoder.block(&mut trace).unwrap() {}
        }
        assert_eq!(trace, expected);
        assert!(decoder.unfinished().is_none());
    }
}

#[test]
fn refusals_name_the_offset() {
    assert_eq!(Trace::decode(b"GGUF...."), Err(TraceError::Foreign));
    let whole = encoded(3);
    let start = encoded(0).len();
    let cut = Trace::decode(&whole[..whole.len() - 1]).unwrap_err();
    assert!(
        cut.to_string()
            .contains(&format!("offset {start}: 1 bytes")),
        "{cut}"
    );
    let mut newer = whole.clone();
    newer[8] = 9;
    assert_eq!(Trace::decode(&newer), Err(TraceError::Version { found: 9 }));
    let mut flipped = whole.clone();
    let last = whole.len() - 5;
    flipped[last] ^= 1;
    assert_eq!(
        Trace::decode(&flipped),
        Err(TraceError::Damaged {
            offset: whole.len() - 4,
            part: "block"
        })
    );
}

/// A block as the encoder frames it, around records of its own.
fn framed(records: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    let length = u32::try_from(records.len()).unwrap().to_le_bytes();
    block.extend(length.iter().chain(&length).chain(&[0]).chain(records));
    let check = crc32(&block);
    block.extend(check.to_le_bytes());
    block
}

#[test]
fn a_valid_check_sum_does_not_excuse_bad_records() {
    let start = encoded(0).len();
    let refused = |records: &[u8]| {
        let mut bytes = encoded(0);
        bytes.extend(framed(records));
        let (trace, error) = Trace::recover(&bytes).unwrap();
        assert_eq!(trace.tokens(), 0, "a block counts whole or not at all");
        error.unwrap()
    };
    // A sound token first: phase u8, then u16 ids.
    let sound = [0, 0, 0, 1, 0, 0, 0];
    for bad in [
        &[7][..],
        &[0, 4, 0, 0, 0, 0, 0],
        &[0, 1, 0, 1, 0, 0, 0],
        &[0, 1, 0],
        &[2, 5, 0, b'a'],
        &[3, 2, 0, 0, 0, b'{', b'}'],
    ] {
        match refused(&[&sound, bad].concat()) {
            TraceError::Record { offset, at, .. } => {
                assert_eq!((offset, at), (start, 7), "{bad:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    let mut unknown = encoded(0);
    let mut block = framed(&sound);
    block[8] = 200;
    let end = block.len() - 4;
    let check = crc32(&block[..end]);
    block[end..].copy_from_slice(&check.to_le_bytes());
    unknown.extend(block);
    let error = Trace::decode(&unknown).unwrap_err();
    assert_eq!(
        error,
        TraceError::Codec {
            offset: start,
            codec: 200
        }
    );
}

#[test]
fn the_encoder_refuses_foreign_tokens() {
    let mut encoder = TraceEncoder::new(&header()).unwrap();
    for bad in [
        &[0, 1][..],
        &[0, 0, 4],
        &[0, 4, 5],
        &[0, 1, 304],
        &[0, 1, 3],
    ] {
        assert!(encoder.push(Phase::Decode, bad).is_err(), "{bad:?}");
    }
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

proptest! {
    #[test]
    fn noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..400), keep in 0usize..60) {
        let mut bytes = encoded(2);
        bytes.truncate(keep);
        bytes.extend(noise);
        prop_assert!(Trace::decode(&bytes).is_err());
    }
}

#[test]
fn a_layer_that_routes_to_thousands_is_checked_in_no_time() {
    let top_k = if cfg!(miri) { 1000 } else { 100_000 };
    let wide = TraceHeader {
        shape: ModelShape::uniform(1, top_k, 1, top_k).unwrap(),
        ..header()
    };
    let mut encoder = TraceEncoder::new(&wide).unwrap();
    let mut routed: Vec<u32> = (0..top_k).collect();
    encoder.push(Phase::Decode, &routed).unwrap();
    routed[top_k as usize - 1] = 7;
    assert!(encoder.push(Phase::Decode, &routed).is_err());
    let trace = Trace::decode(&encoder.finish()).unwrap();
    assert_eq!(trace.token(0).len(), top_k as usize);
}

#[test]
fn sizes_that_overflow_are_refused() {
    for bytes in [u64::MAX, 1 << 60] {
        let refused = ModelShape::new(vec![4, 4], vec![bytes, bytes], vec![1, 1]);
        assert!(matches!(refused, Err(ShapeError::TooLarge { .. })));
    }
}
