//! The real program where something is missing, forbidden, slow or stopped: it says so and gives the same
//! text. Most of it takes root, since such machines are made with mounts, cgroups and filters.

use super::support::{
    self, Answering, Copy, Ran, cgroups, clean, from_environment, greedy, kb_line, program, root,
    run, wait_until, within,
};
use hotpin::bench::protocol::CgroupJoin;
use hotpin::governor::Entry;
use nix::sys::signal::Signal;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PROMPT: &str = "Tell me about the sea.";

fn stock(model: &Path, predict: &str) -> String {
    run(greedy(model, PROMPT, predict, &["--policy", "off"])).success()
}

fn ran(command: &mut Command) -> Ran {
    Ran::of(&command.output().expect("start"))
}

/// The program with a mount table of its own, changed by `mounts`; `$0` there is `place`.
fn among(mounts: &str, place: &Path, args: &[String]) -> Command {
    let mut command = Command::new("unshare");
    let script = format!("set -e; {mounts}; exec \"$@\"");
    command
        .args(["-m", "sh", "-c", &script])
        .arg(place)
        .arg(env!("CARGO_BIN_EXE_hotpin"))
        .args(args)
        .stdin(Stdio::null());
    clean(&mut command);
    command
}

#[test]
fn without_psi_and_with_a_read_only_sys_it_runs_and_says_what_it_cannot_see() {
    let name = "without_psi_and_with_a_read_only_sys_it_runs_and_says_what_it_cannot_see";
    let Some(model) = support::moe(name) else {
        return;
    };
    if !root(name) {
        return;
    }
    let stock = stock(&model, "8");
    let args = greedy(&model, PROMPT, "8", &["--capacity", "120MB"]);
    let nowhere = Path::new("/");
    let blind = ran(&mut among(
        "mount -t tmpfs none /proc/pressure",
        nowhere,
        &args,
    ));
    assert!(blind.stderr.contains("no_psi: Memory stalls"), "{blind:?}");
    assert_eq!(blind.success(), stock);
    let read_only = "mount -o remount,bind,ro /sys; ! touch /sys/fs 2>/dev/null";
    let quiet = ran(&mut among(read_only, nowhere, &args));
    assert!(!quiet.stderr.contains("no_"), "{quiet:?}");
    assert_eq!(quiet.success(), stock);
    // Without any of /sys: cgroups and readahead are unknown.
    let none = ran(&mut among("mount -t tmpfs none /sys", nowhere, &args));
    assert!(none.stderr.contains("no_cgroup"), "{none:?}");
    assert_eq!(none.success(), stock);
}

#[test]
fn without_o_direct_experts_come_through_the_page_cache() {
    let name = "without_o_direct_experts_come_through_the_page_cache";
    let Some(model) = support::moe(name) else {
        return;
    };
    if !root(name) {
        return;
    }
    let stock = stock(&model, "6");
    let place = tempfile::tempdir().expect("temp dir");
    // tmpfs has direct reads nowadays, ramfs has not.
    let mounts = format!(
        "mount -t ramfs none \"$0\"; cp '{}' \"$0/m.gguf\"",
        model.display()
    );
    let inside = place.path().join("m.gguf");
    for (store, words) in [
        ("direct", "experts are read through the page cache"),
        (
            "auto",
            "store mapped, since direct would not do its best here",
        ),
    ] {
        let args = greedy(
            &inside,
            PROMPT,
            "6",
            &["--store", store, "--capacity", "120MB"],
        );
        let ran = ran(&mut among(&mounts, place.path(), &args));
        assert!(ran.stderr.contains(words), "{ran:?}");
        assert_eq!(ran.success(), stock, "{store}");
    }
}

/// Refuses to make rings of io_uring, as container runtimes do.
fn without_uring(command: &mut Command) {
    // Load the number of the call; of io_uring_setup refuse with EPERM, else allow.
    const NUMBER_AT: u32 = 0;
    const LOAD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let setup = u32::try_from(libc::SYS_io_uring_setup).expect("number");
    let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).expect("number");
    let mut filter = [
        line(LOAD, 0, 0, NUMBER_AT),
        line(JUMP_IF_EQUAL, 0, 1, setup),
        line(RETURN, 0, 0, refuse),
        line(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog {
            len: 4,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: plain system calls; the filter lives until they return.
        let code = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            )
        };
        if code == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: between fork and exec only system calls are made.
    unsafe { command.pre_exec(install) };
}

#[test]
fn without_io_uring_it_reads_when_it_waits() {
    let name = "without_io_uring_it_reads_when_it_waits";
    let Some(model) = support::moe(name) else {
        return;
    };
    let stock = stock(&model, "8");
    for (store, words) in [
        ("direct", "experts are read without io_uring"),
        (
            "auto",
            "store mapped, since direct would not do its best here",
        ),
    ] {
        let more = ["--store", store, "--capacity", "120MB"];
        let mut command = program(greedy(&model, PROMPT, "8", &more));
        without_uring(&mut command);
        let ran = ran(&mut command);
        assert!(ran.stderr.contains(words), "{ran:?}");
        assert_eq!(ran.success(), stock, "{store}");
    }
    let mut doctor = program(["doctor", model.to_str().expect("UTF-8")]);
    without_uring(&mut doctor);
    let said = ran(&mut doctor).success();
    assert!(said.contains("\nwarn  io_uring "), "{said}");
}

/// Whether the kernel ended something in the group for want of memory.
fn killed(join: &CgroupJoin) -> bool {
    ["memory.oom_control", "memory.events"].iter().any(|file| {
        let text = std::fs::read_to_string(join.procs.with_file_name(file)).unwrap_or_default();
        text.lines()
            .any(|line| line.starts_with("oom_kill ") && line != "oom_kill 0")
    })
}

/// The model has 45 MiB of dense weights and a token cycle of 85 MiB; program and buffers take some 30 MB.
/// llama.cpp alone lives in each of these groups.
#[test]
fn groups_below_the_dense_weights_and_below_a_token_cycle_are_lived_in() {
    let name = "groups_below_the_dense_weights_and_below_a_token_cycle_are_lived_in";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let stock = stock(&model, "4");
    let own = Copy::of(&model);
    for (limit_bytes, store) in [
        (60_000_000, "mapped"),
        (60_000_000, "direct"),
        (80_000_000, "auto"),
        (110_000_000, "mapped"),
        (160_000_000, "direct"),
    ] {
        own.evict();
        let group = parent.run_group(limit_bytes).expect("group");
        let join = group.join();
        let args = greedy(&own.model, PROMPT, "4", &["--store", store]);
        let ran = ran(&mut within(&join, &program(args)));
        let what = format!("{store} in {limit_bytes} bytes: {ran:?}");
        assert!(!killed(&join), "{what}");
        let locked = !ran.stderr.contains("do not fit beside the reserve");
        assert_eq!(locked, limit_bytes > 150_000_000, "{what}");
        assert_eq!(ran.success(), stock, "{store} in {limit_bytes} bytes");
    }
}

fn pause() -> Duration {
    Duration::from_secs(from_environment("HOTPIN_TEST_PAUSE_S", 2))
}

/// Stopped like by a suspend: no time of its own passes, and the clock has jumped when it goes on.
/// `HOTPIN_TEST_PAUSE_S` makes it longer.
#[test]
fn stopped_and_continued_it_goes_on_where_it_was() {
    let name = "stopped_and_continued_it_goes_on_where_it_was";
    let Some(model) = support::moe(name) else {
        return;
    };
    let stock = stock(&model, "100");
    let folder = tempfile::tempdir().expect("temp dir");
    for store in ["mapped", "direct"] {
        let journal = folder.path().join(store);
        let more = [
            "--store",
            store,
            "--capacity",
            "120MB",
            "--journal",
            journal.to_str().expect("UTF-8"),
        ];
        let run = Answering::begin(program(greedy(&model, PROMPT, "100", &more)), 8);
        run.signal(Signal::SIGSTOP);
        std::thread::sleep(pause());
        run.signal(Signal::SIGCONT);
        let ran = run.ended();
        assert!(!ran.stderr.contains("has not ended"), "{ran:?}");
        assert_eq!(ran.success(), stock, "{store}");
        check_pause(&journal);
    }
}

/// The loop saw the pause as one long tick, not as ticks to be caught up with.
fn check_pause(journal: &Path) {
    let text = std::fs::read_to_string(journal).expect("journal");
    let entries: Vec<Entry> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("entry"))
        .collect();
    let gaps = entries.windows(2).map(|two| two[1].t_s - two[0].t_s);
    let longest = gaps.clone().fold(0.0, f64::max);
    assert!(longest >= pause().as_secs_f64() * 0.9, "{longest} s");
    assert!(gaps.clone().all(|gap| gap > 0.0), "time runs forward");
}

/// A cgroup with one controller, of either version; removed on drop.
struct Group {
    folder: PathBuf,
    version: u8,
}

const HIERARCHIES: &str = "/sys/fs/cgroup";

impl Group {
    /// A new group. Of version 2 every group can be frozen, and the others have their controllers.
    fn of(test: &str, controller: &str) -> Option<Self> {
        let root = Path::new(HIERARCHIES);
        let name = format!("hotpin-test-{}-{test}", std::process::id());
        let unified = root.join("cgroup.controllers").exists();
        let (folder, version) = if unified {
            let name_in_2 = if controller == "blkio" {
                "io"
            } else {
                controller
            };
            if controller != "freezer" {
                let switch = root.join("cgroup.subtree_control");
                // Where that is refused, the files are missing below.
                let _ = std::fs::write(switch, format!("+{name_in_2}"));
            }
            (root.join(name), 2)
        } else {
            (root.join(controller).join(name), 1)
        };
        match std::fs::create_dir(&folder) {
            Ok(()) => Some(Self { folder, version }),
            Err(error) => {
                eprintln!("SKIPPED {test}: {}: {error}", folder.display());
                None
            }
        }
    }

    /// The group in which the disk of those in a memory group can be throttled: of version 2 that one, since
    /// nobody is in two there.
    fn beside(test: &str, memory: &CgroupJoin) -> Option<Self> {
        if memory.version == 1 {
            return Self::of(test, "blkio");
        }
        let folder = memory.procs.parent()?.to_owned();
        let _ = std::fs::write(folder.with_file_name("cgroup.subtree_control"), "+io");
        Some(Self { folder, version: 2 })
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.folder.join(file);
        std::fs::write(&path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }

    fn join(&self) -> CgroupJoin {
        CgroupJoin {
            version: self.version,
            procs: self.folder.join("cgroup.procs"),
        }
    }

    /// Stops everybody in it, and waits until they stand.
    fn freeze(&self) {
        let (file, text) = [("freezer.state", "FROZEN"), ("cgroup.freeze", "1")][self.at()];
        self.write(file, text);
        let (file, line) = [("freezer.state", "FROZEN"), ("cgroup.events", "frozen 1")][self.at()];
        wait_until("the group to freeze", || {
            let state = std::fs::read_to_string(self.folder.join(file));
            state.is_ok_and(|state| state.lines().any(|found| found == line))
        });
    }

    fn thaw(&self) {
        let (file, text) = [("freezer.state", "THAWED"), ("cgroup.freeze", "0")][self.at()];
        self.write(file, text);
    }

    /// As much time as one processor has.
    fn one_processor(&self) {
        if self.version == 2 {
            return self.write("cpu.max", "100000 100000");
        }
        self.write("cpu.cfs_period_us", "100000");
        self.write("cpu.cfs_quota_us", "100000");
    }

    /// Throttles the whole disk below a file. False where that cannot be done.
    fn throttle(&self, model: &Path, bytes_per_s: u64) -> bool {
        let device = std::fs::metadata(model).expect("metadata").dev();
        let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
        let (file, line) = if self.version == 2 {
            ("io.max", format!("{major}:{minor} rbps={bytes_per_s}"))
        } else {
            let line = format!("{major}:{minor} {bytes_per_s}");
            ("blkio.throttle.read_bps_device", line)
        };
        std::fs::write(self.folder.join(file), line).is_ok()
    }

    /// Where the version's file is in a pair.
    fn at(&self) -> usize {
        usize::from(self.version == 2)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its last process may be on its way out.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn frozen_and_thawed_it_goes_on_where_it_was() {
    let name = "frozen_and_thawed_it_goes_on_where_it_was";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(group) = Group::of(name, "freezer") else {
        return;
    };
    let stock = stock(&model, "100");
    let command = program(greedy(&model, PROMPT, "100", &["--capacity", "120MB"]));
    let run = Answering::begin(within(&group.join(), &command), 8);
    group.freeze();
    let cpu = |run: &Answering| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", run.id()));
        let stat = stat.expect("stat");
        let after = stat.rsplit_once(')').expect("stat").1.to_owned();
        after
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|ticks| ticks.parse::<u64>().expect("ticks"))
            .sum::<u64>()
    };
    let before = cpu(&run);
    std::thread::sleep(pause());
    assert_eq!(cpu(&run), before, "it was frozen");
    group.thaw();
    let ran = run.ended();
    assert!(!ran.stderr.contains("has not ended"), "{ran:?}");
    assert_eq!(ran.success(), stock);
}

#[test]
fn half_of_the_processors_give_the_same_text() {
    let name = "half_of_the_processors_give_the_same_text";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(group) = Group::of(name, "cpu") else {
        return;
    };
    group.one_processor();
    let stock = stock(&model, "12");
    // Two threads that get the time of one.
    let mut args = greedy(&model, PROMPT, "12", &["--capacity", "120MB"]);
    let threads = args.iter().position(|arg| arg == "-t").expect("threads");
    args[threads + 1] = "2".into();
    let ran = ran(&mut within(&group.join(), &program(args)));
    assert!(!ran.stderr.contains("has not ended"), "{ran:?}");
    assert_eq!(ran.success(), stock);
}

/// Two on one processor would wait for each other for a time slice at every node. Threads that do not compute stay
/// free to run anywhere.
#[test]
fn where_there_are_as_many_compute_threads_as_processors_each_has_its_own() {
    let name = "where_there_are_as_many_compute_threads_as_processors_each_has_its_own";
    let Some(model) = support::moe(name) else {
        return;
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < 2 {
        return eprintln!("SKIPPED {name}: one processor");
    }
    for (threads, placed) in [(processors, processors), (1, 0)] {
        let mut args = greedy(&model, PROMPT, "200", &["--capacity", "120MB"]);
        let at = args.iter().position(|arg| arg == "-t").expect("threads");
        args[at + 1] = threads.to_string();
        let run = Answering::begin(program(args), 8);
        // The thread that decodes is placed only while it does.
        let mut places = std::collections::BTreeSet::new();
        let mut free = 0;
        let since = Instant::now();
        while free == 0 || since.elapsed() < Duration::from_millis(500) || places.len() < placed {
            assert!(
                since.elapsed() < Duration::from_secs(20),
                "{places:?}, {threads} threads"
            );
            let tasks = std::fs::read_dir(format!("/proc/{}/task", run.id())).expect("tasks");
            for task in tasks.flatten() {
                let status = std::fs::read_to_string(task.path().join("status"));
                let status = status.unwrap_or_default();
                let line = status.lines().find(|l| l.starts_with("Cpus_allowed_list"));
                match line.and_then(|line| line.split_whitespace().nth(1)) {
                    Some(one) if one.parse::<u32>().is_ok() => {
                        places.insert(one.to_owned());
                    }
                    Some(_) => free += 1,
                    None => {}
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(places.len(), placed, "{places:?} of {threads} threads");
        run.signal(Signal::SIGKILL);
        let _ = run.ended();
    }
}

/// 60 MB/s, a twentieth of what such disks give: a token cycle takes more than a second.
#[test]
fn a_disk_twenty_times_slower_gives_the_same_text_and_no_alarm() {
    let name = "a_disk_twenty_times_slower_gives_the_same_text_and_no_alarm";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(group) = Group::of(name, "blkio") else {
        return;
    };
    let own = Copy::of(&model);
    if !group.throttle(&own.model, 60_000_000) {
        return eprintln!(
            "SKIPPED {name}: the disk below {} cannot be throttled",
            own.model.display()
        );
    }
    let stock = stock(&model, "4");
    for store in ["mapped", "direct"] {
        own.evict();
        let args = greedy(
            &own.model,
            "The",
            "4",
            &["--store", store, "--capacity", "100MB", "--raw"],
        );
        let began = Instant::now();
        let slow = ran(&mut within(&group.join(), &program(args.clone())));
        assert!(!slow.stderr.contains("has not ended"), "{slow:?}");
        let seconds = began.elapsed().as_secs_f64();
        assert!(
            seconds > 1.0,
            "{store} took {seconds} s: the disk was not slow"
        );
        own.evict();
        let fast = run(args).success();
        assert_eq!(slow.success(), fast, "{store}");
    }
    assert!(!stock.is_empty());
    own.evict();
    let doctor = program(["doctor", own.model.to_str().expect("UTF-8")]);
    let said = ran(&mut within(&group.join(), &doctor)).stdout;
    assert!(said.contains("0.06 GB/s"), "{said}");
}

/// A session in a group that says more than anybody waits for, with quick ticks.
fn long_answer(own: &Copy, store: &str, join: &CgroupJoin) -> Answering {
    let more = ["--store", store, "--tick-ms", "20"];
    let args = support::with_context(greedy(&own.model, PROMPT, "2000", &more));
    Answering::begin(within(join, &program(args)), 8)
}

/// It says what stock says as far as it comes, and nobody in its group is killed.
fn ends_as_stock(run: Answering, stock: &str, store: &str, join: &CgroupJoin) {
    let said = run.cut_off(100);
    let common = said.len().min(stock.trim_end().len());
    assert_eq!(said[..common], stock[..common], "{store}");
    assert!(!killed(join), "{store}");
}

/// Version 1 refuses a limit below what cannot be reclaimed; whoever lowers it in steps, as orchestrators
/// do, gets there, since each step makes the loop give memory back.
#[test]
fn a_limit_that_is_lowered_while_it_runs_is_followed() {
    let name = "a_limit_that_is_lowered_while_it_runs_is_followed";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let stock = stock(&model, "200");
    let own = Copy::of(&model);
    for store in ["mapped", "direct"] {
        own.evict();
        let group = parent.run_group(600_000_000).expect("group");
        let join = group.join();
        let run = long_answer(&own, store, &join);
        let limit = limit_of(&join);
        let before = run.locked();
        lower(&limit);
        let after = run.locked();
        assert!(
            after < 180_000_000,
            "{store}: {before} locked before, {after} after"
        );
        ends_as_stock(run, &stock, store, &join);
    }
}

/// Lowers a limit to 180 MB, from 580 MB in steps of 20; returns how long the kernel took to take them.
fn lower(limit: &Path) -> Duration {
    let mut took = Duration::ZERO;
    for step in (0..=20).rev() {
        let bytes = 180_000_000 + 20_000_000 * step;
        let began = Instant::now();
        wait_until("the kernel to take the lower limit", || {
            std::fs::write(limit, u64::to_string(&bytes)).is_ok()
        });
        took += began.elapsed();
        // Version 2 takes it at once, and kills where it cannot be kept.
        if limit.ends_with("memory.max") {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    took
}

/// The limit of a group.
fn limit_of(join: &CgroupJoin) -> PathBuf {
    ["memory.limit_in_bytes", "memory.max"]
        .map(|file| join.procs.with_file_name(file))
        .into_iter()
        .find(|path| path.exists())
        .expect("limit")
}

/// The whole lines of a journal that is being written.
fn entries(journal: &Path) -> Vec<Entry> {
    let text = std::fs::read_to_string(journal).unwrap_or_default();
    let entries = text.lines().map(serde_json::from_str);
    entries.filter_map(Result::ok).collect()
}

/// While an expert takes a second to read, the loop leaves off what it was about to pin, and gives memory back
/// as soon as that is needed.
#[test]
fn memory_is_given_back_at_once_while_the_disk_hardly_reads() {
    let name = "memory_is_given_back_at_once_while_the_disk_hardly_reads";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let stock = stock(&model, "200");
    let own = Copy::of(&model);
    let map = hotpin::model::ModelMap::open(&own.model).expect("model map");
    // Of the same disk, so that whoever waited for the program's own pages would wait long.
    let copy = own.folder.path().join("hotpin");
    std::fs::copy(env!("CARGO_BIN_EXE_hotpin"), &copy).expect("copy");
    let copy = copy.canonicalize().expect("path");
    for store in ["mapped", "direct"] {
        own.evict();
        // The group pays for them, too, and takes back what it can.
        support::evict(&copy);
        let group = parent.run_group(420_000_000).expect("group");
        let join = group.join();
        let Some(disk) = Group::beside(name, &join) else {
            return;
        };
        if !disk.throttle(&own.model, FAST) {
            let path = own.model.display();
            return eprintln!("SKIPPED {name}: the disk below {path} cannot be throttled");
        }
        let journal = own.folder.path().join(store);
        let path = journal.display().to_string();
        // Pins are worth having from the start.
        let profile = own.folder.path().join("profile");
        support::low_profile(&map).save(&profile).expect("save");
        let profile = profile.display().to_string();
        let (tick, keep) = (["--tick-ms", "20"], ["--journal", &path]);
        let more = [&["--store", store, "--profile", &profile][..], &tick, &keep].concat();
        let args = support::with_context(greedy(&own.model, PROMPT, "2000", &more));
        let command = within(&join, &of(&copy, &program(args)));
        let run = Answering::begin(within(&disk.join(), &command), 8);
        wait_until("some experts are locked", || run.locked() > 80_000_000);
        let code = || support::code_of(run.id(), &copy);
        wait_until("the program is there", || {
            let (mapped, there) = code();
            mapped > 1_000_000 && there == mapped
        });
        // An expert has 1.4 MB, and the engine reads beside it.
        disk.throttle(&own.model, 1_000_000);
        let limit = limit_of(&join);
        std::fs::write(&limit, "600000000").expect("a higher limit");
        wait_until("there is room that takes minutes to fill", || {
            let entries = entries(&journal);
            let room = |entry: &Entry| entry.capacity_bytes.saturating_sub(entry.pinned_bytes);
            entries
                .last()
                .is_some_and(|entry| room(entry) > 100_000_000)
        });
        std::thread::sleep(Duration::from_secs(1));
        let (mapped, there) = code();
        assert_eq!(there, mapped, "bytes of code");
        let (before, first) = (run.locked(), entries(&journal).len());
        let (took, mut after) = (lower(&limit), 0);
        wait_until("what is locked is below the limit", || {
            after = run.locked();
            after < 120_000_000
        });
        // Each step was answered before the next could be taken; what was short meanwhile is in the journal.
        let mut late = Vec::new();
        wait_until("the journal to tell of it", || {
            late = entries(&journal).into_iter().skip(first).collect();
            let last: Option<&Entry> = late.last();
            last.is_some_and(|entry| entry.capacity_bytes < 120_000_000)
        });
        let short = late.iter().filter_map(|entry| entry.yield_ms);
        let worst = short.fold(0.0, f64::max);
        eprintln!(
            "{store}: {before} bytes locked, {after} after {took:.2?}; short for {worst:.0} ms at most"
        );
        assert!(took < Duration::from_secs(3), "{store}: {took:?}");
        assert!(worst < 200.0, "{store}: {worst} ms");
        disk.throttle(&own.model, FAST);
        ends_as_stock(run, &stock, store, &join);
    }
}

/// A log that nobody takes, as of a terminal that is stopped, holds up neither engine nor governor.
#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let name = "a_log_that_nobody_reads_holds_up_nobody";
    let Some(model) = support::moe(name) else {
        return;
    };
    let more = ["--log-level", "trace", "--tick-ms", "20"];
    let read = run(greedy(&model, PROMPT, "40", &more));
    assert!(read.stderr.len() > 2 << 16, "{}", read.stderr.len());
    let stock = read.success();
    let mut child = program(greedy(&model, PROMPT, "40", &more))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start");
    // A pipe takes 64 KiB, and nobody reads this one.
    let _unread = child.stderr.take().expect("stderr");
    wait_until("it ends", || child.try_wait().expect("wait").is_some());
    let mut text = String::new();
    let mut stdout = child.stdout.take().expect("stdout");
    std::io::Read::read_to_string(&mut stdout, &mut text).expect("text");
    assert_eq!(text, stock);
    assert!(child.wait().expect("wait").success());
}

/// The same command of another program.
fn of(path: &Path, command: &Command) -> Command {
    let mut other = Command::new(path);
    other.args(command.get_args());
    other
}

/// No limit to speak of, bytes a second.
const FAST: u64 = 10_000_000_000;

/// Above `memory.high`, which only version 2 has, whoever allocates is slowed down and made to reclaim, and
/// nobody is killed.
#[test]
fn memory_high_is_a_limit_like_others_and_may_be_lowered_at_once() {
    let name = "memory_high_is_a_limit_like_others_and_may_be_lowered_at_once";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let stock = stock(&model, "200");
    let own = Copy::of(&model);
    for store in ["mapped", "direct"] {
        own.evict();
        let group = parent.run_group(600_000_000).expect("group");
        let join = group.join();
        let high = join.procs.with_file_name("memory.high");
        if !high.exists() {
            return eprintln!("left out: {name}: version 1 of cgroups has no memory.high");
        }
        let set = |bytes: u64| std::fs::write(&high, bytes.to_string()).expect("memory.high");
        set(400_000_000);
        let run = long_answer(&own, store, &join);
        wait_until("experts are locked", || run.locked() > 100_000_000);
        let before = run.locked();
        assert!(before < 400_000_000, "{store}: {before}");
        set(200_000_000);
        let began = Instant::now();
        wait_until("locks below the lower limit", || run.locked() < 200_000_000);
        eprintln!(
            "{store}: {before} locked, {} after {:.2?}",
            run.locked(),
            began.elapsed()
        );
        ends_as_stock(run, &stock, store, &join);
    }
}

/// The machine's clock is set forward and back by a day, and the machine sleeps, while it runs. Only where
/// `HOTPIN_TEST_CLOCK=1` allows that.
#[test]
fn a_clock_that_is_set_changes_nothing() {
    let name = "a_clock_that_is_set_changes_nothing";
    if from_environment("HOTPIN_TEST_CLOCK", 0) == 0 {
        return eprintln!("left out: {name}: HOTPIN_TEST_CLOCK=1 lets it set the machine's clock");
    }
    let Some(model) = support::moe(name) else {
        return;
    };
    // An emulated machine may not wake up.
    let sleeps = from_environment("HOTPIN_TEST_SLEEP", 0) > 0;
    let stock = stock(&model, "100");
    let shell = |line: &str| {
        let output = Command::new("sh").args(["-c", line]).output().expect("sh");
        assert!(output.status.success(), "{line}: {output:?}");
    };
    let folder = tempfile::tempdir().expect("temp dir");
    for store in ["mapped", "direct"] {
        let journal = folder.path().join(store);
        let path = journal.to_str().expect("UTF-8");
        let more = ["--store", store, "--capacity", "120MB", "--journal", path];
        let run = Answering::begin(program(greedy(&model, PROMPT, "100", &more)), 8);
        shell("date -s @$(($(date +%s) + 86400))");
        std::thread::sleep(Duration::from_millis(300));
        shell("date -s @$(($(date +%s) - 2 * 86400))");
        std::thread::sleep(Duration::from_millis(300));
        if sleeps {
            shell("rtcwake -m freeze -s 5");
        }
        shell("date -s @$(($(date +%s) + 86400))");
        let ran = run.ended();
        assert!(!ran.stderr.contains("has not ended"), "{ran:?}");
        assert_eq!(ran.success(), stock, "{store}");
        let text = std::fs::read_to_string(&journal).expect("journal");
        let times: Vec<f64> = text
            .lines()
            .map(|line| serde_json::from_str::<Entry>(line).expect("entry").t_s)
            .collect();
        assert!(times.len() > 5, "{} ticks", times.len());
        assert!(
            times.windows(2).all(|two| two[1] > two[0]),
            "time runs forward"
        );
        assert!(times[times.len() - 1] < 3600.0, "and no day is in it");
    }
}

/// Runs a program and returns what it said.
fn done(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("start");
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    said.trim().to_owned()
}

/// Swap in a file on a loop device, for the whole machine; it goes when this is dropped.
struct Swap {
    device: String,
    _folder: tempfile::TempDir,
}

impl Swap {
    /// `None` unless `HOTPIN_TEST_SWAP=1` allows that.
    fn beside(test: &str, model: &Path) -> Option<Self> {
        if from_environment("HOTPIN_TEST_SWAP", 0) == 0 {
            eprintln!("left out: {test}: HOTPIN_TEST_SWAP=1 lets it change the machine's swap");
            return None;
        }
        let folder = tempfile::tempdir_in(model.parent().expect("folder")).expect("temp dir");
        let file = folder.path().join("swap");
        let path = file.to_str().expect("UTF-8");
        done("fallocate", &["-l", "512M", path]);
        let device = done("losetup", &["--find", "--show", path]);
        done("mkswap", &[&device]);
        done("swapon", &[&device]);
        Some(Self {
            device,
            _folder: folder,
        })
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        for (program, option) in [("swapoff", "--verbose"), ("losetup", "--detach")] {
            let _ = Command::new(program).args([option, &self.device]).output();
        }
    }
}

/// What a program that may lock little holds may be swapped out, and the text is the same.
#[test]
fn with_swap_in_a_file_unlocked_memory_is_told_and_the_text_is_the_same() {
    let name = "with_swap_in_a_file_unlocked_memory_is_told_and_the_text_is_the_same";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(_swap) = Swap::beside(name, &model) else {
        return;
    };
    let stock = stock(&model, "20");
    let doctor = run(["doctor", model.to_str().expect("UTF-8")]).stdout;
    let args = greedy(&model, PROMPT, "20", &["--capacity", "200MB"]);
    let ran = support::without_privilege(8 << 20, &args);
    assert!(doctor.contains("\nwarn  swap "), "{doctor}");
    assert!(ran.stderr.contains("store mapped"), "{ran:?}");
    assert_eq!(ran.success(), stock);
}

/// What of an unlocked arena was swapped out is given up and read again, and what else of the process was takes
/// nothing: capacity is what the lower limit leaves.
#[test]
fn with_swap_in_a_file_experts_that_were_swapped_out_are_given_up_and_memory_is_used() {
    let name = "with_swap_in_a_file_experts_that_were_swapped_out_are_given_up_and_memory_is_used";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = cgroups(name) else {
        return;
    };
    let Some(_swap) = Swap::beside(name, &model) else {
        return;
    };
    let stock = stock(&model, "200");
    let own = Copy::of(&model);
    let group = parent.run_group(600_000_000).expect("group");
    let join = group.join();
    // A group for a measurement may not swap.
    for (file, allowed) in [("memory.swappiness", "60"), ("memory.swap.max", "max")] {
        let path = join.procs.with_file_name(file);
        if path.exists() {
            std::fs::write(path, allowed).expect(file);
        }
    }
    let journal = own.model.with_extension("journal");
    let path = journal.to_str().expect("UTF-8");
    let more = ["--store", "direct", "--journal", path];
    let args = support::with_context(greedy(&own.model, PROMPT, "2000", &more));
    let run = Answering::begin(within(&join, &support::unprivileged(8 << 20, &args)), 8);
    wait_until("most of the memory is used", || {
        let last = entries(&journal).pop();
        last.is_some_and(|entry| entry.transit_bytes > 300_000_000)
    });
    let status = format!("/proc/{}/status", run.id());
    let swapped = || kb_line(&status, "VmSwap").unwrap_or(0);
    run.signal(Signal::SIGSTOP);
    wait_until("the kernel to swap it out", || {
        std::fs::write(limit_of(&join), "300000000").is_ok()
    });
    let (out, first) = (swapped(), entries(&journal).len());
    run.signal(Signal::SIGCONT);
    let given_up = || -> u64 {
        let all = entries(&journal);
        all[first..]
            .iter()
            .filter_map(|entry| entry.lost_bytes)
            .sum()
    };
    wait_until("what was swapped out is given up", || given_up() > out / 10);
    let mut room = (0, 0);
    wait_until("memory is used, and no more than there is", || {
        let last = entries(&journal).pop().expect("a tick");
        room = (last.capacity_bytes, last.transit_bytes + last.pinned_bytes);
        room.1 > 150_000_000 && room.1 <= room.0 && room.0 <= 300_000_000 - (64 << 20)
    });
    eprintln!(
        "{out} bytes swapped out, {} still are; {} given up; capacity and experts {room:?} of 300 MB",
        swapped(),
        given_up(),
    );
    ends_as_stock(run, &stock, "direct", &join);
}
