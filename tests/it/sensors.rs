//! The sensors on recorded trees, on trees that change under them, and on this machine.

use super::support::{copy_tree, recorded_tree as tree};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use hotpin::sensors::{
    Degraded, Roots, Sample, Sensors, map_count, read_ahead_kb, read_ahead_kb_of_device,
    system_summary,
};
use hotpin_controllers::Moment;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn at_ms(ms: u64) -> Moment {
    Moment { ns: ms * 1_000_000 }
}

/// One line for each thing that the sensors tell of a recorded tree.
fn describe(directory: &Path) -> String {
    let mut sensors = Sensors::open(&Roots::under(directory), at_ms(0));
    let sample = sensors.sample(at_ms(100));
    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").unwrap();
    if let Some(host) = sample.host {
        line(format!(
            "host {} of {} MiB",
            host.available_bytes / MIB,
            host.total_bytes / MIB
        ));
    }
    if let Some(cgroup) = sample.cgroup {
        let path = sensors
            .binding_cgroup()
            .unwrap()
            .strip_prefix(directory)
            .unwrap();
        let (available, limit) = (cgroup.available_bytes / MIB, cgroup.limit_bytes / MIB);
        line(format!(
            "cgroup {available} of {limit} MiB at {}",
            path.display()
        ));
    }
    line(format!("levels {}", sensors.cgroup_levels().len()));
    if let Some(p) = sample.pressure {
        let (some, full, pages) = (p.some_total_us, p.full_total_us, p.direct_reclaim_pages);
        line(if p.psi_absent {
            format!("pressure without psi reclaimed {pages:?}")
        } else {
            format!("pressure some {some} full {full} reclaimed {pages:?}")
        });
    }
    if let (Some(faults), Some(minor)) = (sample.faults, sample.minor_faults) {
        line(format!("faults {} major {minor} minor", faults.major));
    }
    if let Some(read_bytes) = sample.read_bytes {
        line(format!("read {read_bytes}"));
    }
    let locks = sample.locks;
    let (memlock, locked) = (locks.memlock_bytes(), locks.locked_bytes);
    line(format!(
        "memlock {memlock:?} locked {locked:?} maps {:?}",
        locks.max_map_count
    ));
    let degraded: Vec<&str> = sample.degraded.iter().map(Degraded::name).collect();
    line(format!("degraded {}", degraded.join(" ")));
    out
}

fn check(case: &str, expect: &[&str]) {
    let found = describe(&tree(case));
    assert_eq!(found.lines().collect::<Vec<_>>(), expect, "tree {case}");
}

#[test]
fn recorded_trees_are_read_as_they_were_meant() {
    // Version 1 has memory, version 2 is mounted without it but has a pressure file.
    check(
        "hybrid",
        &[
            "host 23428 of 24105 MiB",
            "cgroup 298 of 300 MiB at sys/fs/cgroup/memory/hotpin.slice/bench",
            "levels 3",
            "pressure some 88506 full 84371 reclaimed Some(0)",
            "faults 0 major 75 minor",
            "read 0",
            "memlock None locked Some(0) maps Some(65530)",
            "degraded ",
        ],
    );
    // The container's own cgroup is bind-mounted, so the mount is our cgroup and nothing is above;
    // locked file pages do not count as reclaimable; counters are per zone.
    check(
        "v1-docker",
        &[
            "host 20480 of 32768 MiB",
            "cgroup 5120 of 8192 MiB at sys/fs/cgroup/memory",
            "levels 1",
            "pressure without psi reclaimed Some(3520)",
            "faults 120 major 8000 minor",
            "read 700000",
            "memlock Some(65536) locked Some(65536) maps Some(65530)",
            "degraded no_psi",
        ],
    );
    // The parent slice's memory.high binds; its pressure and reclaim are what we watch.
    check(
        "v2-user-slice",
        &[
            "host 40960 of 65536 MiB",
            "cgroup 8192 of 12288 MiB at sys/fs/cgroup/user.slice/user-1000.slice",
            "levels 5",
            "pressure some 1444 full 1030 reclaimed Some(73)",
            "faults 4321 major 100000 minor",
            "read 4000000",
            "memlock Some(8388608) locked Some(524288) maps Some(1048576)",
            "degraded ",
        ],
    );
    // A rootless container: usage is above memory.high, and all capabilities are worth nothing.
    check(
        "v2-container",
        &[
            "host 40960 of 65536 MiB",
            "cgroup 2216 of 3584 MiB at sys/fs/cgroup",
            "levels 1",
            "pressure some 50 full 40 reclaimed Some(5)",
            "faults 2 major 100 minor",
            "memlock Some(8388608) locked Some(0) maps Some(65530)",
            "degraded no_self_io",
        ],
    );
    // The mount, not below /sys, shows an ancestor, but not the levels between it and us. Usage
    // exceeds the limit by more than could be reclaimed.
    check(
        "v2-hidden",
        &[
            "host 12288 of 16384 MiB",
            "cgroup 0 of 6144 MiB at run/host cgroup",
            "levels 1",
            "pressure some 70 full 60 reclaimed None",
            "faults 2 major 100 minor",
            "read 0",
            "memlock None locked Some(0) maps Some(65530)",
            "degraded cgroup_level_hidden",
        ],
    );
    check(
        "no-psi",
        &[
            "host 12288 of 16384 MiB",
            "cgroup 9216 of 10240 MiB at sys/fs/cgroup/system.slice/hotpin.service",
            "levels 2",
            "pressure without psi reclaimed Some(7)",
            "faults 2 major 100 minor",
            "read 0",
            "memlock None locked Some(0) maps Some(65530)",
            "degraded no_psi",
        ],
    );
    check(
        "no-cgroup",
        &[
            "host 12288 of 16384 MiB",
            "levels 0",
            "pressure some 10 full 9 reclaimed None",
            "faults 2 major 100 minor",
            "memlock Some(65536) locked Some(0) maps Some(65530)",
            "degraded no_vmstat no_cgroup no_self_io",
        ],
    );
    check(
        "nothing",
        &[
            "levels 0",
            "memlock None locked None maps None",
            "degraded no_meminfo no_vmstat no_psi no_cgroup no_stat no_self_io no_status \
             no_lock_limit no_max_map_count",
        ],
    );
}

/// A tree in a temporary directory, with the files of `case`, and sensors on it.
struct Live {
    directory: TempDir,
    sensors: Sensors,
}

impl Live {
    fn copy_of(case: &str) -> Self {
        let directory = TempDir::new().unwrap();
        copy_tree(&tree(case), directory.path());
        let sensors = Sensors::open(&Roots::under(directory.path()), at_ms(0));
        Self { directory, sensors }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn sample_at_ms(&mut self, ms: u64) -> Sample {
        self.sensors.sample(at_ms(ms))
    }

    fn reason(&self, state: Degraded) -> String {
        let found = self
            .sensors
            .degraded()
            .into_iter()
            .find(|d| d.state == state);
        found.map(|d| d.reason).unwrap_or_default()
    }
}

const SERVICE: &str = "sys/fs/cgroup/system.slice/hotpin.service";

#[test]
fn a_changed_limit_is_seen_in_the_next_sample() {
    let mut live = Live::copy_of("no-psi");
    assert_eq!(live.sample_at_ms(100).cgroup.unwrap().limit_bytes, 10 << 30);
    live.write(&format!("{SERVICE}/memory.max"), "3221225472\n");
    let cgroup = live.sample_at_ms(200).cgroup.unwrap();
    assert_eq!(
        (cgroup.limit_bytes, cgroup.available_bytes),
        (3 << 30, 2 << 30)
    );
    live.write(&format!("{SERVICE}/memory.max"), "max\n");
    assert_eq!(live.sample_at_ms(300).cgroup, None);
    assert!(
        !live
            .sensors
            .sample(at_ms(400))
            .degraded
            .contains(Degraded::NoCgroup)
    );
}

#[test]
fn a_move_to_another_cgroup_is_seen_within_a_second() {
    let mut live = Live::copy_of("no-psi");
    for file in ["memory.max", "memory.high", "memory.current", "memory.stat"] {
        let text = fs::read_to_string(live.path(&format!("{SERVICE}/{file}"))).unwrap();
        live.write(&format!("sys/fs/cgroup/other/{file}"), &text);
    }
    live.write("sys/fs/cgroup/other/memory.max", "4294967296\n");
    live.write("proc/self/cgroup", "0::/other\n");
    assert_eq!(live.sample_at_ms(900).cgroup.unwrap().limit_bytes, 10 << 30);
    assert_eq!(live.sample_at_ms(1000).cgroup.unwrap().limit_bytes, 4 << 30);
    assert!(live.sensors.binding_cgroup().unwrap().ends_with("other"));
}

#[test]
fn a_level_that_fails_is_looked_for_anew_at_once_and_then_skipped_by_name() {
    let mut live = Live::copy_of("no-psi");
    live.write("sys/fs/cgroup/system.slice/memory.max", "8589934592\n");
    assert_eq!(live.sample_at_ms(100).cgroup.unwrap().limit_bytes, 8 << 30);
    live.write(&format!("{SERVICE}/memory.current"), "many\n");
    let sample = live.sample_at_ms(200);
    assert_eq!(sample.cgroup.unwrap().limit_bytes, 8 << 30);
    assert!(sample.degraded.contains(Degraded::CgroupLevelSkipped));
    let reason = live.reason(Degraded::CgroupLevelSkipped);
    assert!(
        reason.contains("hotpin.service/memory.current: line 1: value: `many`"),
        "{reason}"
    );
    live.write(&format!("{SERVICE}/memory.current"), "5\n");
    let recovered = live.sample_at_ms(300);
    assert!(!recovered.degraded.contains(Degraded::CgroupLevelSkipped));
    assert!(recovered.degraded.since(sample.degraded).is_empty());
}

#[test]
fn a_child_without_use_hierarchy_is_not_held_to_its_parent() {
    let mut live = Live::copy_of("hybrid");
    let slice = "sys/fs/cgroup/memory/hotpin.slice";
    live.write(&format!("{slice}/memory.limit_in_bytes"), "1000000\n");
    assert_eq!(
        live.sample_at_ms(100).cgroup.unwrap().limit_bytes,
        1_000_000
    );
    live.write(&format!("{slice}/memory.use_hierarchy"), "0\n");
    assert_eq!(
        live.sample_at_ms(1200).cgroup.unwrap().limit_bytes,
        300 << 20
    );
}

#[test]
fn a_sensor_may_fail_vanish_and_come_back() {
    let mut live = Live::copy_of("v2-user-slice");
    live.write("proc/meminfo", "MemTotal: 1 kB\nMemAvailable: lots kB\n");
    let sample = live.sample_at_ms(100);
    assert_eq!(sample.host, None);
    assert!(sample.degraded.contains(Degraded::NoMeminfo));
    let reason = live.reason(Degraded::NoMeminfo);
    assert!(
        reason.ends_with("proc/meminfo: line 2: MemAvailable: `lots` is not a number"),
        "{reason}"
    );
    live.write("proc/meminfo", "MemTotal: 2 kB\nMemAvailable: 1 kB\n");
    assert_eq!(live.sample_at_ms(200).host.unwrap().available_bytes, 1024);
    // An open file outlives its name in a plain directory; the rescan notices.
    fs::remove_file(live.path("proc/self/io")).unwrap();
    assert_eq!(live.sample_at_ms(1300).read_bytes, None);
    assert!(
        live.reason(Degraded::NoSelfIo)
            .contains("proc/self/io: No such file")
    );
    live.write("proc/self/io", "rchar: 4\nread_bytes: 3\n");
    assert_eq!(live.sample_at_ms(1400).read_bytes, Some(3));
    live.write("proc/self/io", &"x".repeat(5 << 20));
    assert_eq!(live.sample_at_ms(1500).read_bytes, None);
    assert!(
        live.reason(Degraded::NoSelfIo)
            .contains("more than 4194304 bytes")
    );
}

/// As with no descriptor left: what is open can be read, and nothing can be opened.
#[test]
fn what_cannot_be_opened_again_goes_on_being_read() {
    let mut live = Live::copy_of("no-psi");
    let before = live.sample_at_ms(100);
    assert!(before.host.is_some() && before.cgroup.is_some() && before.faults.is_some());
    let parts = ["meminfo", "self/cgroup", "self/mountinfo", "self/stat"]
        .map(|file| format!("proc/{file}"))
        .into_iter()
        .chain(["max", "current", "stat"].map(|file| format!("{SERVICE}/memory.{file}")));
    let replaced: Vec<(PathBuf, PathBuf)> = parts
        .map(|file| (live.path(&file), live.path(&format!("{file}.before"))))
        .collect();
    for (path, aside) in &replaced {
        fs::rename(path, aside).unwrap();
        std::os::unix::fs::symlink(path, path).unwrap();
        assert!(fs::read(path).is_err(), "a link to itself");
    }
    for ms in [1200, 2400, 3600] {
        let sample = live.sample_at_ms(ms);
        let now = (sample.host, sample.cgroup, sample.faults);
        assert_eq!(now, (before.host, before.cgroup, before.faults), "{ms}");
        assert_eq!(sample.degraded, before.degraded);
    }
    // What is open is the file that was there, so what it says now is seen.
    let path = live.path("proc/meminfo.before");
    fs::write(path, "MemTotal: 2 kB\nMemAvailable: 1 kB\n").unwrap();
    assert_eq!(live.sample_at_ms(4800).host.unwrap().available_bytes, 1024);
    for (path, aside) in &replaced {
        fs::remove_file(path).unwrap();
        fs::rename(aside, path).unwrap();
    }
    live.write(&format!("{SERVICE}/memory.max"), "3221225472\n");
    let cgroup = live.sample_at_ms(6000).cgroup.unwrap();
    assert_eq!(cgroup.limit_bytes, 3 << 30);
}

#[test]
fn pressure_totals_do_not_jump_when_their_source_changes() {
    let psi = |some: u64| {
        let averages = "avg10=0.00 avg60=0.00 avg300=0.00";
        format!("some {averages} total={some}\nfull {averages} total=0\n")
    };
    let mut live = Live::copy_of("no-psi");
    live.write("proc/pressure/memory", &psi(1000));
    live.write(&format!("{SERVICE}/memory.pressure"), &psi(50));
    let some_at = |live: &mut Live, ms| live.sample_at_ms(ms).pressure.unwrap().some_total_us;
    // The sample that opened the sensors told reclaim without PSI, so PSI's total begins here.
    assert_eq!(some_at(&mut live, 1000), 0);
    live.write(&format!("{SERVICE}/memory.pressure"), &psi(57));
    assert_eq!(some_at(&mut live, 1100), 7);
    live.write(&format!("{SERVICE}/memory.max"), "max\n");
    assert_eq!(
        some_at(&mut live, 1200),
        7,
        "the machine's total begins where the cgroup's ended"
    );
    live.write("proc/pressure/memory", &psi(1003));
    assert_eq!(some_at(&mut live, 1300), 10);
    live.write("proc/pressure/memory", &psi(2));
    assert_eq!(
        some_at(&mut live, 1400),
        10,
        "a total that falls adds nothing"
    );
    live.write("proc/pressure/memory", &psi(4));
    assert_eq!(some_at(&mut live, 1500), 12);
}

#[test]
fn without_psi_the_reclaim_counter_is_told_and_totals_begin_when_psi_comes() {
    let mut live = Live::copy_of("no-psi");
    let pressure = live.sample_at_ms(100).pressure.unwrap();
    assert!(pressure.psi_absent);
    assert_eq!(pressure.direct_reclaim_pages, Some(7));
    let averages = "avg10=0.00 avg60=0.00 avg300=0.00";
    let psi = |some: u64| format!("some {averages} total={some}\nfull {averages} total=0\n");
    live.write("proc/pressure/memory", &psi(5000));
    let begun = live.sample_at_ms(1200).pressure.unwrap();
    assert!(!begun.psi_absent);
    assert_eq!(begun.some_total_us, 0, "what came before was not seen");
    live.write("proc/pressure/memory", &psi(5040));
    assert_eq!(live.sample_at_ms(1300).pressure.unwrap().some_total_us, 40);
    // Without both there is nothing to tell.
    for file in ["pressure/memory", "vmstat"] {
        fs::remove_file(live.path(&format!("proc/{file}"))).unwrap();
    }
    assert_eq!(live.sample_at_ms(3000).pressure, None);
}

#[test]
fn a_clock_that_steps_backwards_is_a_rescan_and_not_a_panic() {
    let mut live = Live::copy_of("no-psi");
    live.sample_at_ms(10_000);
    live.write("proc/self/cgroup", "0::/\n");
    assert_eq!(live.sample_at_ms(5_000).cgroup, None);
    assert!(
        live.reason(Degraded::NoCgroup)
            .contains("no mounted hierarchy")
    );
}

#[test]
fn readahead_is_found_for_disks_partitions_and_file_systems_without_a_device() {
    let directory = TempDir::new().unwrap();
    let write = |path: &str, text: &str| {
        let path = directory.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("sys/devices/nvme0n1/queue/read_ahead_kb", "128\n");
    write("sys/devices/nvme0n1/nvme0n1p2/partition", "2\n");
    write("sys/class/bdi/0:45/read_ahead_kb", "4096\n");
    let block = directory.path().join("sys/dev/block");
    fs::create_dir_all(&block).unwrap();
    for (number, device) in [("259:0", "nvme0n1"), ("259:2", "nvme0n1/nvme0n1p2")] {
        let target = Path::new("../../devices").join(device);
        std::os::unix::fs::symlink(target, block.join(number)).unwrap();
    }
    let roots = Roots::under(directory.path());
    assert_eq!(read_ahead_kb_of_device(&roots, 259, 0).unwrap(), 128);
    assert_eq!(read_ahead_kb_of_device(&roots, 259, 2).unwrap(), 128);
    assert_eq!(read_ahead_kb_of_device(&roots, 0, 45).unwrap(), 4096);
    assert!(
        read_ahead_kb_of_device(&roots, 8, 0)
            .unwrap_err()
            .is_absent()
    );
    assert!(
        read_ahead_kb(&roots, &directory.path().join("no such model"))
            .unwrap_err()
            .is_absent()
    );
}

#[test]
fn mappings_are_counted() {
    let directory = TempDir::new().unwrap();
    let roots = Roots::under(directory.path());
    assert!(map_count(&roots).unwrap_err().is_absent());
    fs::create_dir_all(roots.proc.join("self")).unwrap();
    fs::write(roots.proc.join("self/maps"), "1-2 r\n".repeat(70_000)).unwrap();
    assert_eq!(map_count(&roots).unwrap(), 70_000);
}

#[test]
fn the_summary_says_what_binds() {
    let summary = system_summary(&Roots::under(&tree("v2-user-slice")));
    assert_eq!(summary.usable_bytes(), Some(8 << 30));
    assert_eq!(summary.cgroup_limit_bytes, Some(12 << 30));
    assert_eq!(summary.memlock_bytes, Some(8 << 20));
    assert_eq!(summary.mlocked_bytes, Some(512 << 10));
    assert!(summary.psi && !summary.ipc_lock);
    let nothing = system_summary(&Roots::under(&tree("nothing")));
    assert_eq!(nothing.usable_bytes(), None);
    assert_eq!(nothing.degraded.len(), 9);
    assert!(
        serde_json::to_string(&nothing)
            .unwrap()
            .contains("\"state\":\"no_meminfo\"")
    );
}

#[test]
fn this_machine_is_read() {
    let roots = Roots::default();
    let mut sensors = Sensors::open(&roots, at_ms(0));
    let sample = sensors.sample(at_ms(100));
    let host = sample.host.expect("Linux has /proc/meminfo");
    assert!(host.available_bytes <= host.total_bytes);
    assert!(sample.minor_faults.unwrap() > 0);
    assert!(sample.resident_bytes.unwrap() > 0);
    assert!(sample.locks.max_map_count.unwrap() > map_count(&roots).unwrap());
    assert_eq!(sample.degraded.iter().count(), sensors.degraded().len());
}
