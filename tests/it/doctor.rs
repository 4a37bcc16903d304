//! `hotpin doctor`: every check on recorded trees, and the program on this machine.

use super::support::{self, copy_tree, program, recorded_tree, run, within, without_privilege};
use hotpin::doctor::{Check, Facts, Level, Report, Space, Subject};
use hotpin::model::{Demand, ModelMap};
use hotpin::sensors::Roots;
use hotpin::store::{DiskTrial, try_disk};
use hotpin_controllers::AdaptiveConfig;
use serde_json::Value;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// A machine that was recorded, with some files that are otherwise.
struct Machine {
    directory: TempDir,
    subject: Subject,
    disk: Result<DiskTrial, String>,
    spaces: Vec<Space>,
}

impl Machine {
    /// A recorded tree with settings as they should be; a model of 20 GiB with a token cycle of 1 GiB.
    fn new(case: &str) -> Self {
        let directory = TempDir::new().expect("temp dir");
        copy_tree(&recorded_tree(case), directory.path());
        let machine = Self {
            directory,
            subject: Subject {
                model: "/models/m.gguf".into(),
                demand: Demand {
                    dense_bytes: 2 * GIB,
                    expert_bytes: 18 * GIB,
                    token_cycle_bytes: GIB,
                },
                slices: 5000,
                device: Some((259, 0)),
                program: "/usr/local/bin/hotpin".into(),
                root: false,
            },
            disk: Ok(DiskTrial {
                not_direct: None,
                not_uring: None,
                read_bytes: 1 << 20,
                bytes_per_s: Some(2e9),
            }),
            spaces: vec![Space {
                folder: ".".into(),
                free_bytes: 50 * GIB,
            }],
        };
        machine.write("proc/swaps", SWAPS);
        machine.write("proc/self/maps", "1-2 r\n");
        machine.write("proc/sys/vm/overcommit_memory", "0\n");
        machine.write("proc/sys/kernel/hostname", "f00ba4\n");
        machine.write("proc/sys/kernel/io_uring_disabled", "0\n");
        machine.write("sys/module/zswap/parameters/enabled", "N\n");
        let huge = "always [madvise] never\n";
        machine.write("sys/kernel/mm/transparent_hugepage/enabled", huge);
        machine.write("sys/devices/system/node/has_memory", "0\n");
        machine.write("sys/class/bdi/259:0/read_ahead_kb", "128\n");
        machine
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.directory.path().join(path);
        std::fs::create_dir_all(path.parent().expect("folder")).expect("folders");
        std::fs::write(path, text).expect("write");
    }

    fn report(&self) -> Report {
        let roots = Roots::under(self.directory.path());
        let facts = Facts::read(
            &roots,
            &self.subject,
            self.disk.clone(),
            self.spaces.clone(),
        );
        let report = Report::new(&self.subject, &facts);
        for check in &report.checks {
            assert_eq!(
                check.fix.is_some(),
                check.level > Level::Ok,
                "what is amiss has a remedy, and nothing else: {check:?}"
            );
            assert!(!check.said.is_empty(), "{check:?}");
        }
        report
    }

    /// What is amiss: level, name and remedy. Paths of the tree are told as those of the machine.
    fn amiss(&self) -> Vec<(Level, &'static str, String)> {
        let real = self.directory.path().canonicalize().expect("path");
        let checks = self.report().checks.into_iter();
        checks
            .filter(|check| check.level > Level::Ok)
            .map(|check| {
                let fix = check.fix.expect("remedy");
                let fix = fix.replace(self.directory.path().to_str().expect("UTF-8"), "");
                let fix = fix.replace(real.to_str().expect("UTF-8"), "");
                (check.level, check.name, fix)
            })
            .collect()
    }

    /// The only thing that is amiss.
    fn only(&self, level: Level, name: &str, fix: &str) {
        assert_eq!(self.amiss(), [(level, name_of(name), fix.to_owned())]);
    }

    fn said(&self, name: &str) -> String {
        let found: Vec<Check> = self.report().checks;
        let check = found.into_iter().find(|check| check.name == name);
        check.expect("check").said
    }
}

/// The name as the report has it, of which there is one copy for the whole program.
fn name_of(name: &str) -> &'static str {
    name.to_owned().leak()
}

const SWAPS: &str = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";

/// 60 GB of memory, 8 MiB of locks, memory.high on a slice.
fn laptop() -> Machine {
    let machine = Machine::new("v2-user-slice");
    machine.write("proc/self/limits", LOCKS_UNLIMITED);
    machine
}

const LOCKS_UNLIMITED: &str = "Limit                     Soft Limit           Hard Limit           Units\n\
    Max locked memory         unlimited            unlimited            bytes\n";
const LOCKS_8_MIB: &str = "Limit                     Soft Limit           Hard Limit           Units\n\
    Max locked memory         8388608              8388608              bytes\n";
const LOCKS_8_MIB_SOFT: &str = "Limit                     Soft Limit           Hard Limit           Units\n\
    Max locked memory         8388608              unlimited            bytes\n";

#[test]
fn a_machine_as_it_should_be_gets_no_advice() {
    let machine = laptop();
    assert_eq!(machine.amiss(), []);
    let report = machine.report();
    assert_eq!(report.worst, Level::Ok);
    let names: Vec<&str> = report.checks.iter().map(|check| check.name).collect();
    // The slice has a limit, the four other levels have none.
    assert_eq!(
        names,
        [
            "memory",
            "cgroup limit",
            "swap",
            "zswap",
            "overcommit",
            "lock limit",
            "max_map_count",
            "psi",
            "huge pages",
            "numa",
            "read_ahead_kb",
            "O_DIRECT",
            "io_uring",
            "disk",
            "free space"
        ]
    );
    assert!(report.to_string().ends_with("15 ok, 0 warn, 0 fail"));
}

#[test]
fn a_lock_limit_is_raised_where_it_can_be() {
    let mut machine = laptop();
    assert!(
        machine
            .said("cgroup limit")
            .contains("8.00 GiB of 12.0 GiB")
    );
    machine.write("proc/self/limits", LOCKS_8_MIB_SOFT);
    let reserve = AdaptiveConfig::default().capacity.cgroup_reserve_bytes;
    let fits_kib = (8 * GIB - reserve) / 1024;
    machine.only(Level::Warn, "lock limit", &format!("ulimit -l {fits_kib}"));
    machine.write("proc/self/limits", LOCKS_8_MIB);
    machine.only(
        Level::Warn,
        "lock limit",
        "sudo setcap cap_ipc_lock+ep /usr/local/bin/hotpin",
    );
    assert!(machine.said("lock limit").contains("8.00 MiB"));
    machine.subject.root = true;
    machine.subject.program = "/my programs/hotpin".into();
    machine.only(
        Level::Warn,
        "lock limit",
        "setcap cap_ipc_lock+ep '/my programs/hotpin'",
    );
    machine.write(".dockerenv", "");
    machine.only(
        Level::Warn,
        "lock limit",
        "docker run --ulimit memlock=-1:-1 ...",
    );
}

#[test]
fn a_rootless_containers_capabilities_do_not_count() {
    let mut machine = Machine::new("v2-container");
    machine.subject.demand.token_cycle_bytes = 100 << 20;
    machine.subject.demand.dense_bytes = GIB;
    let amiss = machine.amiss();
    let locks = amiss.iter().find(|(_, name, _)| *name == "lock limit");
    let fix = "sudo prlimit --pid $$ --memlock=unlimited:unlimited".to_owned();
    assert_eq!(locks, Some(&(Level::Warn, "lock limit", fix)));
    // Its /proc/self/io is hidden.
    assert!(
        amiss
            .iter()
            .any(|(_, name, fix)| *name == "sensors" && fix.contains("mount -t proc")),
        "{amiss:?}"
    );
}

#[test]
fn a_cgroup_that_holds_too_little_fails_with_the_command_that_raises_it() {
    let machine = laptop();
    let slice = "sys/fs/cgroup/user.slice/user-1000.slice";
    machine.write(&format!("{slice}/memory.max"), "3221225472\n");
    let usage = "4294967296\n";
    machine.write(&format!("{slice}/memory.current"), usage);
    let amiss = machine.amiss();
    let (level, name, fix) = &amiss[0];
    assert_eq!((*level, *name), (Level::Fail, "cgroup limit"), "{amiss:?}");
    assert!(
        fix.starts_with("sudo systemctl set-property user-1000.slice MemoryMax="),
        "{fix}"
    );
    // The model, the reserve, and what is in use and cannot be dropped.
    let bytes: u64 = fix.rsplit('=').next().expect("bytes").parse().expect("n");
    assert!(bytes > 20 * GIB && bytes < 28 * GIB, "{bytes}");
    assert!(machine.said("cgroup limit").contains("not even"));
    // A service of the user's own systemd, held by memory.high.
    let machine = laptop();
    let scope = format!("{slice}/user@1000.service/app.slice/hotpin.scope");
    machine.write(&format!("{scope}/memory.high"), "1073741824\n");
    let (level, name, fix) = machine.amiss().remove(0);
    assert_eq!((level, name), (Level::Fail, "cgroup limit"));
    assert!(
        fix.starts_with("systemctl --user set-property hotpin.scope MemoryHigh="),
        "{fix}"
    );
    // Version 1, without systemd.
    let mut machine = Machine::new("hybrid");
    let amiss = machine.amiss();
    assert_eq!(
        amiss.len(),
        2,
        "the group and the slice above it: {amiss:?}"
    );
    assert_eq!(amiss[0].0, Level::Fail);
    let file = "/sys/fs/cgroup/memory/hotpin.slice/bench/memory.limit_in_bytes";
    let fix = &amiss[0].2;
    assert!(
        fix.starts_with("echo ") && fix.ends_with(&format!(" | sudo tee {file}")),
        "{fix}"
    );
    machine.subject.root = true;
    let fix = machine.amiss().remove(0).2;
    assert!(fix.ends_with(&format!(" > {file}")), "{fix}");
    // A container's limit is set from outside it.
    machine.write(".dockerenv", "");
    let fix = machine.amiss().remove(0).2;
    assert!(
        fix.starts_with("docker update --memory=") && fix.ends_with(" f00ba4"),
        "{fix}"
    );
}

#[test]
fn a_host_without_room_and_a_dense_model_are_told_apart() {
    let mut machine = laptop();
    machine.write(
        "proc/meminfo",
        "MemTotal: 67108864 kB\nMemAvailable: 1000000 kB\n",
    );
    machine.only(
        Level::Fail,
        "memory",
        "ps -eo rss,pid,comm --sort=-rss | head",
    );
    assert!(
        machine
            .said("memory")
            .contains("not even the dense weights fit")
    );
    machine.write(
        "proc/meminfo",
        "MemTotal: 67108864 kB\nMemAvailable: 3500000 kB\n",
    );
    assert!(machine.said("memory").contains("experts of one token"));
    machine.subject.demand = Demand {
        dense_bytes: 20 * GIB,
        expert_bytes: 0,
        token_cycle_bytes: 0,
    };
    assert!(machine.said("memory").contains("dense model does not fit"));
    machine.subject.demand.dense_bytes = GIB;
    assert_eq!(machine.amiss(), []);
}

#[test]
fn swap_zswap_and_strict_accounting_are_judged_by_what_may_be_locked() {
    let machine = laptop();
    let disk = format!("{SWAPS}/dev/nvme0n1p3 partition\t8388604\t0\t-2\n");
    machine.write("proc/swaps", &disk);
    assert_eq!(machine.amiss(), [], "all may be locked");
    machine.write("sys/module/zswap/parameters/enabled", "Y\n");
    machine.only(
        Level::Warn,
        "zswap",
        "echo N | sudo tee /sys/module/zswap/parameters/enabled",
    );
    machine.write("sys/module/zswap/parameters/enabled", "N\n");
    machine.write("proc/self/limits", LOCKS_8_MIB);
    let fixes: Vec<String> = machine.amiss().into_iter().map(|(_, _, fix)| fix).collect();
    assert_eq!(
        fixes,
        [
            "sudo swapoff -a",
            "sudo setcap cap_ipc_lock+ep /usr/local/bin/hotpin"
        ]
    );
    assert!(
        machine
            .said("lock limit")
            .contains("not even the dense weights")
    );
    machine.write("proc/self/limits", LOCKS_UNLIMITED);
    for file in ["/swap\\040file file", "/dev/loop0 partition"] {
        machine.write("proc/swaps", &format!("{SWAPS}{file}\t8388604\t0\t-2\n"));
        let (level, name, fix) = machine.amiss().remove(0);
        assert_eq!((level, name), (Level::Warn, "swap"));
        assert!(fix.starts_with("sudo swapoff "), "{fix}");
    }
    machine.write("proc/swaps", SWAPS);
    machine.write("proc/sys/vm/overcommit_memory", "2\n");
    machine.only(
        Level::Warn,
        "overcommit",
        "sudo sysctl -w vm.overcommit_memory=0",
    );
    let meminfo = "MemTotal: 67108864 kB\nMemAvailable: 41943040 kB\nCommitLimit: 60000000 kB\n";
    machine.write(
        "proc/meminfo",
        &format!("{meminfo}Committed_AS: 8000000 kB\n"),
    );
    assert_eq!(machine.amiss(), []);
}

#[test]
fn what_the_kernel_does_not_tell_is_named() {
    let machine = Machine::new("no-psi");
    let (level, name, fix) = machine.amiss().remove(0);
    assert_eq!((level, name), (Level::Warn, "psi"));
    assert!(
        fix.contains("psi=1") && fix.contains("update-grub"),
        "{fix}"
    );
    let machine = Machine::new("v2-hidden");
    let amiss = machine.amiss();
    let hidden = amiss.iter().find(|(_, name, _)| *name == "sensors");
    let fix = "sudo nsenter --target 1 --cgroup $SHELL".to_owned();
    assert_eq!(hidden, Some(&(Level::Warn, "sensors", fix)));
    // A machine of which nothing can be read: every check is there and says so.
    let mut machine = Machine::new("nothing");
    machine.subject.device = None;
    let report = machine.report();
    assert_eq!(report.worst, Level::Warn);
    for name in ["memory", "lock limit", "max_map_count", "psi", "sensors"] {
        let check = report.checks.iter().find(|check| check.name == name);
        assert_eq!(check.expect(name).level, Level::Warn, "{name}");
    }
    let machine = laptop();
    std::fs::remove_dir_all(machine.directory.path().join("proc/sys")).expect("remove");
    std::fs::remove_dir_all(machine.directory.path().join("sys/kernel")).expect("remove");
    std::fs::remove_dir_all(machine.directory.path().join("sys/module")).expect("remove");
    std::fs::remove_dir_all(machine.directory.path().join("sys/devices")).expect("remove");
    let names: Vec<&str> = machine.amiss().iter().map(|(_, name, _)| *name).collect();
    assert_eq!(names, ["overcommit", "max_map_count"]);
}

#[test]
fn mappings_huge_pages_and_nodes() {
    let mut machine = laptop();
    machine.subject.slices = 1_000_000;
    machine.only(
        Level::Warn,
        "max_map_count",
        "sudo sysctl -w vm.max_map_count=2031616",
    );
    machine.subject.slices = 5000;
    machine.write(
        "sys/kernel/mm/transparent_hugepage/enabled",
        "always madvise [never]\n",
    );
    machine.only(
        Level::Warn,
        "huge pages",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    );
    machine.write(
        "sys/kernel/mm/transparent_hugepage/enabled",
        "[always] madvise never\n",
    );
    machine.write("sys/devices/system/node/has_memory", "0-1,4\n");
    machine.only(
        Level::Warn,
        "numa",
        "numactl --interleave=all /usr/local/bin/hotpin run /models/m.gguf -p ...",
    );
    assert!(machine.said("numa").starts_with("3 nodes"));
}

#[test]
fn the_models_file_system_is_judged_by_how_it_reads() {
    let mut machine = laptop();
    machine.write("sys/class/bdi/259:0/read_ahead_kb", "8192\n");
    machine.only(
        Level::Warn,
        "read_ahead_kb",
        "echo 128 | sudo tee /sys/class/bdi/259:0/read_ahead_kb",
    );
    machine.write("sys/class/bdi/259:0/read_ahead_kb", "128\n");
    let well = machine.disk.clone();
    let with = |change: &dyn Fn(&mut DiskTrial)| {
        let mut trial = well.clone().expect("trial");
        change(&mut trial);
        Ok(trial)
    };
    machine.disk = with(&|trial| {
        trial.not_direct = Some("opening with O_DIRECT failed: EINVAL".into());
        trial.bytes_per_s = None;
    });
    let copy = "cp /models/m.gguf /var/tmp/".to_owned();
    assert_eq!(
        machine.amiss(),
        [
            (Level::Warn, "O_DIRECT", copy.clone()),
            (Level::Warn, "disk", copy)
        ]
    );
    machine.disk = with(&|trial| trial.bytes_per_s = Some(120e6));
    machine.only(Level::Warn, "disk", "lsblk -d -o NAME,ROTA,TRAN,SIZE,MODEL");
    assert!(machine.said("disk").contains("0.12 GB/s"));
    machine.disk = with(&|trial| trial.not_uring = Some("EPERM".into()));
    let (_, name, fix) = machine.amiss().remove(0);
    assert_eq!(name, "io_uring");
    assert!(fix.starts_with("uname -r"), "{fix}");
    machine.write("proc/sys/kernel/io_uring_disabled", "2\n");
    machine.only(
        Level::Warn,
        "io_uring",
        "sudo sysctl -w kernel.io_uring_disabled=0",
    );
    machine.write("proc/sys/kernel/io_uring_disabled", "0\n");
    let status = "VmLck: 0 kB\nCapEff: 0000000000000000\nSeccomp:\t2\n";
    machine.write("proc/self/status", status);
    machine.only(
        Level::Warn,
        "io_uring",
        "systemd-run --user --pty /usr/local/bin/hotpin doctor /models/m.gguf",
    );
    machine.write("run/.containerenv", "");
    machine.only(
        Level::Warn,
        "io_uring",
        "podman run --security-opt seccomp=unconfined ...",
    );
    machine.disk = Err("Input/output error".into());
    machine.only(Level::Fail, "disk", "ls -lL /models/m.gguf");
    machine.disk = well;
    machine.spaces[0].free_bytes = 1 << 20;
    machine.only(
        Level::Warn,
        "free space",
        "du -xh --max-depth=1 . | sort -h | tail",
    );
}

/// The report of `hotpin doctor --json` and the exit code.
fn doctor(command: &mut Command) -> (Value, Option<i32>) {
    let output = command.output().expect("start");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(stderr, "");
    let report = serde_json::from_slice(&output.stdout).expect("JSON");
    (report, output.status.code())
}

fn level_of(report: &Value, name: &str) -> String {
    let checks = report["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["name"] == name);
    let check = check.unwrap_or_else(|| panic!("{name} in {report}"));
    check["level"].as_str().expect("level").to_owned()
}

#[test]
fn this_machine_is_examined_by_root_and_by_an_ordinary_user() {
    let name = "this_machine_is_examined_by_root_and_by_an_ordinary_user";
    let Some(model) = support::moe(name) else {
        return;
    };
    let model_text = model.to_str().expect("UTF-8");
    let (report, code) = doctor(&mut program(["doctor", model_text, "--json"]));
    assert_eq!(report["model"], model_text);
    let failed = report["worst"] == "fail";
    assert_eq!(code, Some(i32::from(failed)), "{report}");
    // The model lies on a disk here, in CI as well.
    assert_eq!(level_of(&report, "O_DIRECT"), "ok", "{report}");
    let said = run(["doctor", model_text]);
    assert!(said.stdout.contains("\nok    O_DIRECT "), "{}", said.stdout);

    if !nix::unistd::geteuid().is_root() {
        return eprintln!("SKIPPED half of {name}: only root may become somebody else");
    }
    let all = support::for_everybody(&model);
    let readable = all.model.to_str().expect("UTF-8").to_owned();
    let mut nobody = all.as_nobody(
        8 << 20,
        &["doctor".to_owned(), readable, "--json".to_owned()],
    );
    let (report, code) = doctor(&mut nobody);
    assert_eq!(level_of(&report, "lock limit"), "warn", "{report}");
    let fixes = report.to_string();
    // Inside a container, and so that it could be copied into a shell.
    assert!(
        fixes.contains("sudo setcap cap_ipc_lock+ep") || fixes.contains("--ulimit memlock=-1:-1"),
        "{fixes}"
    );
    assert_eq!(level_of(&report, "O_DIRECT"), "ok");
    assert_eq!(code, Some(0), "{report}");
}

#[test]
fn root_without_the_privilege_is_told_so_in_words() {
    let name = "root_without_the_privilege_is_told_so_in_words";
    let Some(model) = support::moe(name) else {
        return;
    };
    let args = ["doctor", model.to_str().expect("UTF-8")].map(str::to_owned);
    let said = without_privilege(64 << 10, &args).success();
    assert!(said.contains("RLIMIT_MEMLOCK is 64.0 KiB"), "{said}");
    assert!(said.contains("-> "), "{said}");
}

#[test]
fn a_real_cgroup_below_the_dense_weights_fails_the_examination() {
    let name = "a_real_cgroup_below_the_dense_weights_fails_the_examination";
    let Some(model) = support::moe(name) else {
        return;
    };
    let Some(parent) = support::cgroups(name) else {
        return;
    };
    let group = parent.run_group(40 << 20).expect("group");
    let join = group.join();
    let args = ["doctor", model.to_str().expect("UTF-8"), "--json"];
    let (report, code) = doctor(&mut within(&join, &program(args)));
    assert_eq!(level_of(&report, "cgroup limit"), "fail", "{report}");
    assert_eq!(code, Some(1));
    let folder = join.procs.parent().expect("folder");
    assert!(
        report.to_string().contains(folder.to_str().expect("UTF-8")),
        "{report}"
    );
}

#[test]
fn a_disk_is_read_for_as_long_as_was_asked() {
    let Some(model) = support::moe("a_disk_is_read_for_as_long_as_was_asked") else {
        return;
    };
    let map = ModelMap::open(&model).expect("model map");
    let options = hotpin::store::DirectOptions::default();
    let began = std::time::Instant::now();
    let trial = try_disk(&map, options, Duration::from_millis(100)).expect("trial");
    assert!(began.elapsed() >= Duration::from_millis(100));
    assert_eq!(trial.read_bytes % 512, 0);
    assert!(trial.bytes_per_s.expect("O_DIRECT works here") > 1e6);
    let cached = hotpin::store::DirectOptions {
        direct: false,
        uring: false,
        ..options
    };
    let trial = try_disk(&map, cached, Duration::from_millis(1)).expect("trial");
    assert_eq!(trial.bytes_per_s, None, "the page cache is no disk");
    assert!(trial.not_direct.is_some() && trial.not_uring.is_some());
}
