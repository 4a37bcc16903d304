//! Tests of the parsers: documented forms, named errors, hostile text.

use proptest::prelude::*;

use super::cgroup_paths;
use super::error::{ParseError, Problem};
use super::text::*;

#[test]
fn stat_counts_fields_from_the_last_parenthesis() {
    let text = "7 (a) (b c) 9) S 1 7 7 0 -1 4194560 1234 0 56 0 70 8 0 0 20 0";
    assert_eq!(
        stat(text),
        Ok(Stat {
            minor_faults: 1234,
            major_faults: 56,
            cpu_ticks: 78
        })
    );
}

#[test]
fn reclaim_counters_are_summed_over_zones_and_throttling_is_not_scanning() {
    let old = "pgsteal_direct_dma 1\npgsteal_direct_normal 20\npgscan_direct_dma 2\n\
               pgscan_direct_normal 30\npgscan_direct_throttle 999\nworkingset_refault 5\n";
    let parsed = vmstat(old).unwrap();
    assert_eq!(parsed.direct_steal_pages, 21);
    assert_eq!(parsed.direct_scan_pages, Some(32));
    assert_eq!(parsed.refault_file_pages, Some(5));
    assert_eq!(parsed.major_faults, None);
}

#[test]
fn limits_have_their_unlimited_forms() {
    assert_eq!(v2_limit("max\n"), Ok(None));
    assert_eq!(v2_limit("0\n"), Ok(Some(0)));
    // i64::MAX rounded down to 4 KiB and to 64 KiB pages, and as very old kernels print it.
    for none in [
        "9223372036854771712",
        "9223372036854710272",
        "9223372036854775807",
    ] {
        assert_eq!(v1_limit(none), Ok(None), "{none}");
    }
    assert_eq!(v1_limit("2621440000\n"), Ok(Some(2_621_440_000)));
    let limits = |soft| format!("Max locked memory         {soft}            unlimited   bytes\n");
    assert_eq!(memlock_limit(&limits("unlimited")), Ok(None));
    assert_eq!(memlock_limit(&limits("8388608")), Ok(Some(8 << 20)));
}

#[test]
fn lock_privilege_is_one_bit_and_counts_in_the_initial_namespace_only() {
    assert!(status("CapEff:\t0000000000004000\n").unwrap().ipc_lock);
    assert!(!status("CapEff:\t00000000a80425fb\n").unwrap().ipc_lock);
    assert_eq!(
        in_initial_user_namespace("         0          0 4294967295\n"),
        Ok(true)
    );
    assert_eq!(in_initial_user_namespace("0 1000 1\n"), Ok(false));
    assert_eq!(
        in_initial_user_namespace("0 0 4294967295\n1 1 1\n"),
        Ok(false)
    );
}

fn check_error<T: std::fmt::Debug>(
    result: Result<T, ParseError>,
    line: usize,
    item: &str,
    expect: impl Fn(&Problem) -> bool,
) {
    let error = result.unwrap_err();
    assert_eq!((error.line, error.item.as_str()), (line, item), "{error}");
    assert!(expect(&error.problem), "{error}");
}

#[test]
fn errors_name_line_and_item() {
    let missing = |p: &Problem| *p == Problem::Missing;
    let not_a_number = |p: &Problem| matches!(p, Problem::NotANumber { .. });
    check_error(
        meminfo("MemTotal: 5 kB\nMemFree: 3 kB\n"),
        2,
        "MemAvailable",
        missing,
    );
    check_error(
        meminfo("MemTotal: 5 kB\nMemAvailable: x kB\n"),
        2,
        "MemAvailable",
        not_a_number,
    );
    check_error(meminfo("MemTotal: 5 MB\n"), 1, "MemTotal", not_a_number);
    let overflow = format!("MemTotal: {} kB\n", u64::MAX);
    check_error(meminfo(&overflow), 1, "MemTotal", |p| {
        matches!(p, Problem::TooLarge { .. })
    });
    check_error(
        psi("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"),
        1,
        "full",
        missing,
    );
    check_error(psi("full\nsome\n"), 2, "some", missing);
    check_error(psi("some total=1\n"), 1, "some", |p| {
        matches!(p, Problem::Malformed { .. })
    });
    check_error(stat("7 (x) S 1 2"), 1, "minflt", missing);
    check_error(
        io("rchar: 1\nread_bytes: -1\n"),
        2,
        "read_bytes",
        not_a_number,
    );
    check_error(v2_stat("inactive_file 1\n"), 1, "active_file", missing);
    check_error(single_number(""), 1, "value", not_a_number);
}

/// Feeds `text` to every parser; whatever they answer, they answer.
fn parse_all(text: &str) {
    let _ = meminfo(text);
    let _ = vmstat(text);
    let _ = psi(text);
    let _ = stat(text);
    let _ = io(text);
    let _ = status(text);
    let _ = memlock_limit(text);
    let _ = in_initial_user_namespace(text);
    let _ = single_number(text);
    let _ = v2_limit(text);
    let _ = v1_limit(text);
    let _ = v2_stat(text);
    let _ = v1_stat(text);
    let _ = cgroup_paths::places(text, text);
    let _ = cgroup_paths::places("4:memory:/a\n0::/b\n", text);
    let _ = cgroup_paths::places(text, "1 2 0:3 /.. /m rw - cgroup2 cgroup2 rw\n");
}

/// Words that take a parser deep into its input before the text turns hostile.
fn word() -> impl Strategy<Value = String> {
    let known = prop::sample::select(vec![
        "MemTotal:",
        "MemAvailable:",
        "kB",
        "pgsteal_direct",
        "some",
        "full",
        "avg10=",
        "total=",
        "avg60=0.0",
        "avg300=0.0",
        "read_bytes:",
        "CapEff:",
        "VmLck:",
        "Max locked memory",
        "max",
        "unlimited",
        "inactive_file",
        "total_active_file",
        "(",
        ")",
        "0::/",
        "4:memory:/..",
        "/..",
        " - cgroup2 cgroup2",
        " - cgroup",
        "rw,memory",
        "shared:",
        "\\040",
        "\\",
        "é",
        "=",
        ":",
        "18446744073709551615",
        "18446744073709551616",
        "-1",
    ]);
    prop_oneof![4 => known.prop_map(str::to_owned), 1 => "[0-9]{1,4}", 1 => ".{0,6}"]
}

fn hostile() -> impl Strategy<Value = String> {
    let separator = prop::sample::select(vec![" ", "\n", "\t", "", "\r\n", "  "]);
    prop::collection::vec((word(), separator), 0..40)
        .prop_map(|parts| parts.into_iter().map(|(word, gap)| word + gap).collect())
}

proptest! {
    #[test]
    fn no_parser_panics_on_hostile_words(text in hostile()) {
        parse_all(&text);
    }

    #[test]
    fn no_parser_panics_on_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        parse_all(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn no_parser_panics_on_a_real_file_cut_and_altered(
        file in prop::sample::select(REAL_FILES.to_vec()),
        cut in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut bytes = file.as_bytes()[..cut.index(file.len() + 1)].to_vec();
        if !bytes.is_empty() {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        parse_all(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn meminfo_reads_back_what_was_written(total in 0u64..1 << 50, available in 0u64..1 << 50) {
        let text = format!("MemTotal:  {total} kB\nX(y): 3\nMemAvailable:\t{available} kB\n");
        let parsed = meminfo(&text).unwrap();
        prop_assert_eq!(parsed.total_bytes, total * 1024);
        prop_assert_eq!(parsed.available_bytes, available * 1024);
    }
}

const REAL_FILES: &[&str] = &[
    include_str!("../../tests/data/sensors/hybrid/proc/meminfo"),
    include_str!("../../tests/data/sensors/hybrid/proc/vmstat"),
    include_str!("../../tests/data/sensors/hybrid/proc/pressure/memory"),
    include_str!("../../tests/data/sensors/hybrid/proc/self/stat"),
    include_str!("../../tests/data/sensors/hybrid/proc/self/io"),
    include_str!("../../tests/data/sensors/hybrid/proc/self/status"),
    include_str!("../../tests/data/sensors/hybrid/proc/self/limits"),
    include_str!("../../tests/data/sensors/hybrid/proc/self/cgroup"),
    include_str!("../../tests/data/sensors/hybrid/proc/self/mountinfo"),
    include_str!("../../tests/data/sensors/v2-user-slice/proc/self/mountinfo"),
];
