use super::*;
use proptest::prelude::*;

fn header() -> TraceHeader {
    TraceHeader {
        model: "tiny".to_owned(),
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
    for tokens in [0, 1, 1024, 1025, 3000] {
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
fn every_flipped_bit_and_every_cut_is_noticed() {
    let whole = encoded(20);
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        assert!(Trace::decode(&damaged).is_err(), "flip at {at}");
    }
    let header_bytes = encoded(0).len();
    for len in (0..whole.len()).filter(|&len| len != header_bytes) {
        assert!(Trace::decode(&whole[..len]).is_err(), "cut at {len}");
    }
}

#[test]
fn refusals_name_the_offset() {
    assert_eq!(Trace::decode(b"GGUF...."), Err(TraceError::Foreign));
    let whole = encoded(3);
    let cut = Trace::decode(&whole[..whole.len() - 1]).unwrap_err();
    assert!(
        cut.to_string()
            .contains(&format!("offset {}", whole.len() - 4)),
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

#[test]
fn a_valid_check_sum_does_not_excuse_bad_ids() {
    let whole = encoded(1);
    let start = encoded(0).len();
    // count u32, phase u8, then u16 ids.
    for (at, value) in [(4, 7), (5, 4), (7, 0)] {
        let mut bad = whole.clone();
        bad[start + at] = value;
        let end = bad.len() - 4;
        let check = crc32(&bad[start..end]);
        bad[end..].copy_from_slice(&check.to_le_bytes());
        match Trace::decode(&bad) {
            Err(TraceError::Value { offset, .. }) => assert_eq!(offset, start + at),
            other => panic!("{other:?}"),
        }
    }
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
