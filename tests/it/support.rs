//! What the tests of the running engine share: the test model, the program, and the kernel's books.

pub use super::program::{THREADS, clean, program};

use super::program::model_file;
use hotpin::bench::cgroup::CgroupParent;
use hotpin::bench::protocol::CgroupJoin;
use hotpin::engine::{EngineOptions, Model, Session, Token};
use hotpin::governor::{
    DenseWeights, Fill, Governor, GovernorOptions, Journal, OnFailure, Regulated, STUCK_AFTER,
};
use hotpin::model::ModelMap;
use hotpin::plant::{Rig, RigOptions};
use hotpin::profile::Profile;
use hotpin::sensors::Roots;
use hotpin::store::StoreKind;
use hotpin_controllers::config::CapacityConfig;
use hotpin_controllers::{
    Action, AdaptiveConfig, Decision, ExpertId, Observation, Policy, PolicyKind, Reason,
};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process, VmFlags};
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A time between ticks that no test lives to see: only the first tick happens.
pub const NEVER: Duration = Duration::from_secs(3600);

fn present(test: &str, path: PathBuf) -> Option<PathBuf> {
    if path.is_file() {
        return Some(path);
    }
    let ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(
        !ci,
        "{test} needs {}: make test makes the model",
        path.display()
    );
    eprintln!("SKIPPED {test}: make test makes the model");
    None
}

/// The MoE test model: 30 layers of 8 experts, top-2. `None`, said, where it has not been made.
pub fn moe(test: &str) -> Option<PathBuf> {
    present(test, model_file("HOTPIN_TEST_MOE", "test-8x2-q4_0.gguf"))
}

/// The dense model that it was made from.
pub fn dense(test: &str) -> Option<PathBuf> {
    present(
        test,
        model_file("HOTPIN_TEST_DENSE", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    )
}

/// The test model in this process. Whoever holds it is alone with the engine and with locked memory.
pub struct Loaded {
    pub map: &'static ModelMap,
    pub model: &'static Model,
    _alone: MutexGuard<'static, ()>,
}

/// Waits for a test's turn to lock memory, which is counted for the whole process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Loads the test model, once a process, and waits for its turn.
pub fn loaded(test: &str) -> Option<Loaded> {
    static LOADED: OnceLock<(ModelMap, Model)> = OnceLock::new();
    let path = moe(test)?;
    let alone = alone();
    let (map, model) = LOADED.get_or_init(|| {
        let map = ModelMap::open(&path).expect("model map");
        let model = Model::load(&path, |_| true).expect("load");
        (map, model)
    });
    Some(Loaded {
        map,
        model,
        _alone: alone,
    })
}

impl Loaded {
    /// Tokens of a text of the built-in workload.
    pub fn tokens(&self, count: usize) -> Vec<Token> {
        let mut tokens = self.model.tokenize(TEXT, false, false).expect("tokens");
        assert!(
            tokens.len() >= count,
            "the text has {} tokens",
            tokens.len()
        );
        tokens.truncate(count);
        tokens
    }

    /// Bytes of the largest expert.
    pub fn expert_bytes(&self) -> u64 {
        let shape = self.map.shape();
        (0..shape.layers())
            .map(|layer| shape.layer_expert_bytes(layer))
            .max()
            .expect("MoE")
    }

    /// Counts as of a profile: every layer's low indices are its hot ones.
    pub fn profile(&self) -> Vec<f32> {
        let shape = self.map.shape();
        (0..shape.layers())
            .flat_map(|layer| {
                (0..shape.experts_in(layer))
                    .map(|index| [64.0, 32.0, 8.0, 2.0][(index as usize).min(3)])
            })
            .collect()
    }

    /// A session under a policy, with a capacity.
    pub fn rig(
        &self,
        policy: PolicyKind,
        limit_bytes: Option<u64>,
        tick: Duration,
    ) -> Rig<'static> {
        let options = self.rig_options(policy, limit_bytes, tick);
        Rig::assemble(self.model, self.map, options, &mut |_, _| {}).expect("rig")
    }

    pub fn rig_options(
        &self,
        policy: PolicyKind,
        limit_bytes: Option<u64>,
        tick: Duration,
    ) -> RigOptions {
        let mut control = AdaptiveConfig::default();
        control.capacity.limit_bytes = limit_bytes;
        // The default is made for models of many GB; this one must be able to pin in 100 MB.
        control.pins.transit_floor_bytes = 1 << 20;
        RigOptions {
            control,
            profile: Some(self.profile()),
            tick,
            ..RigOptions::new(policy, StoreKind::Mapped, engine_options())
        }
    }

    /// A governor that pins 40 experts and panics on its tick number `fails_at`.
    pub fn doomed_governor(&self, rig: &Rig<'_>, fails_at: u32) -> Governor {
        let doomed = Doomed {
            ticks: 0,
            fails_at,
            scores: vec![0.0; self.map.shape().total_experts()],
        };
        self.governor(rig, Box::new(doomed), OnFailure::GoOn, STUCK_AFTER)
    }

    /// A governor of its own beside that of a rig.
    pub fn governor(
        &self,
        rig: &Rig<'_>,
        policy: Box<dyn Policy>,
        on_failure: OnFailure,
        stuck_after: Duration,
    ) -> Governor {
        Governor::start(
            GovernorOptions {
                on_failure,
                stuck_after,
                ..governor_options(Duration::from_millis(20))
            },
            Regulated {
                store: rig.store.clone().expect("store"),
                counters: Arc::clone(&rig.counters),
                shape: self.map.shape().clone(),
            },
            policy,
            Journal::new(None),
            &mut |_, _| {},
        )
        .expect("governor")
    }
}

/// A governor's settings where dense weights are left alone and experts have three parts.
pub fn governor_options(tick: Duration) -> GovernorOptions {
    GovernorOptions {
        tick,
        roots: Roots::default(),
        dense: DenseWeights {
            refused: true,
            ..DenseWeights::new(0, &CapacityConfig::default())
        },
        slices_per_expert: 3,
        recording: None,
        on_failure: OnFailure::GoOn,
        fill: Fill::Before,
        stuck_after: STUCK_AFTER,
        vram: None,
    }
}

/// Pins some experts, then loses its mind.
pub struct Doomed {
    pub ticks: u32,
    pub fails_at: u32,
    pub scores: Vec<f32>,
}

impl Policy for Doomed {
    fn name(&self) -> &'static str {
        "doomed"
    }

    fn tick(&mut self, _: &Observation<'_>, out: &mut Decision) {
        out.clear();
        out.capacity_bytes = u64::MAX;
        self.ticks += 1;
        assert!(self.ticks < self.fails_at, "the policy has lost its mind");
        let pin = |n: u32| Action {
            expert: ExpertId(n),
            reason: Reason::Fill,
            score: 1.0,
        };
        out.pin = (0..40).map(|n| pin(n * 6)).collect();
    }

    fn scores(&self) -> &[f32] {
        &self.scores
    }
}

/// Engine settings of the tests in process.
pub fn engine_options() -> EngineOptions {
    let threads = THREADS.parse().expect("number");
    EngineOptions {
        threads,
        n_ctx: 512,
        ..EngineOptions::default()
    }
}

/// Text whose tokens are forced.
pub const TEXT: &str = include_str!("../../workload/prose.txt");

/// Decodes and hashes the logits bit by bit.
pub fn decode_hashed(session: &mut Session<'_>, tokens: &[Token], hash: &mut Sha256) {
    session.decode(tokens).expect("decode");
    for logit in session.logits() {
        hash.update(logit.to_bits().to_le_bytes());
    }
}

/// Hash over the logits of a number of tokens decoded one by one in an empty context.
pub fn forced_hash(session: &mut Session<'_>, tokens: &[Token]) -> String {
    session.clear();
    let mut hash = Sha256::new();
    for token in tokens {
        decode_hashed(session, std::slice::from_ref(token), &mut hash);
    }
    format!("{:x}", hash.finalize())
}

/// Hash over what a rig computes: `decoded` tokens one by one, then in an empty context a prompt of 100
/// tokens at once and what follows it.
pub fn bits(rig: &mut Rig<'_>, tokens: &[Token], decoded: usize) -> String {
    let decoded = forced_hash(&mut rig.session, &tokens[..decoded]);
    rig.session.clear();
    let mut hash = Sha256::new();
    decode_hashed(&mut rig.session, &tokens[..100], &mut hash);
    for token in &tokens[100..102] {
        decode_hashed(&mut rig.session, std::slice::from_ref(token), &mut hash);
    }
    format!("{decoded} {:x}", hash.finalize())
}

/// Bytes in a `kB` line of a file of /proc.
pub fn kb_line(path: impl AsRef<Path>, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(
        line.trim()
            .strip_suffix(" kB")?
            .trim()
            .parse::<u64>()
            .ok()?
            << 10,
    )
}

/// Bytes that this process has locked, by the kernel's books.
pub fn locked_bytes() -> u64 {
    kb_line("/proc/self/status", "VmLck").expect("VmLck")
}

/// Bytes of the model that another process has locked: whole mappings that the kernel flags, without those of
/// the program and its libraries. 0 when the process has ended.
pub fn locked_by(pid: u32) -> u64 {
    // Also of one that was removed.
    let of_program = |path: &Path| !path.to_string_lossy().contains(".gguf");
    let locked = mappings(pid).into_iter().filter(|map| {
        map.extension.vm_flags.contains(VmFlags::LO)
            && !matches!(&map.pathname, MMapPath::Path(path) if of_program(path))
    });
    locked.map(|map| map.extension.map["Size"]).sum()
}

/// Bytes of code of `program` that another process has mapped, and those of them that are in memory.
pub fn code_of(pid: u32, program: &Path) -> (u64, u64) {
    let code = mappings(pid).into_iter().filter(|map| {
        map.perms.contains(MMPermissions::EXECUTE)
            && map.pathname == MMapPath::Path(program.to_path_buf())
    });
    code.fold((0, 0), |(mapped, there), map| {
        let sizes = &map.extension.map;
        (mapped + sizes["Size"], there + sizes["Rss"])
    })
}

fn mappings(pid: u32) -> Vec<MemoryMap> {
    let process = Process::new(i32::try_from(pid).expect("pid"));
    let maps = process.and_then(|process| process.smaps());
    maps.map(|maps| maps.into_iter().collect())
        .unwrap_or_default()
}

/// Waits until `done`, looking often; panics with `what` after a time that only a hang takes.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "waited for 60 s: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What came of a run of the program.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(output: &Output) -> Self {
        let ran = Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        ran
    }

    /// Checks the exit code and returns stdout.
    pub fn success(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout
    }

    /// Checks that it failed with this code and said all of these words on stderr.
    pub fn failure(self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {}", self.stderr);
        }
    }
}

/// Runs the program to its end.
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    Ran::of(&program(args).output().expect("start"))
}

/// Runs the program to its end with `input` on stdin.
pub fn run_with_input<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, input: &str) -> Ran {
    let mut child = program(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start");
    let mut stdin = child.stdin.take().expect("stdin");
    stdin.write_all(input.as_bytes()).expect("write");
    drop(stdin);
    Ran::of(&child.wait_with_output().expect("wait"))
}

/// Arguments of a greedy `hotpin run` of `predict` tokens.
pub fn greedy(model: &Path, prompt: &str, predict: &str, more: &[&str]) -> Vec<String> {
    let model = model.to_str().expect("UTF-8 path");
    let fixed = [
        "run", model, "-p", prompt, "-n", predict, "--temp", "0", "-t", THREADS, "-c", "256",
    ];
    fixed
        .iter()
        .chain(more)
        .map(|arg| (*arg).to_owned())
        .collect()
}

/// A recorded tree of `/proc` and `/sys`.
pub fn recorded_tree(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/sensors")
        .join(case)
}

/// Copies a folder and all below it.
pub fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Runs the program without the privilege to lock, under a limit.
pub fn without_privilege(memlock_bytes: u64, args: &[String]) -> Ran {
    let output = unprivileged(memlock_bytes, args).output();
    Ran::of(&output.expect("util-linux is installed"))
}

/// The program, that is to run like that.
pub fn unprivileged(memlock_bytes: u64, args: &[String]) -> Command {
    let limit = format!("--memlock={memlock_bytes}");
    let dropped = ["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"];
    // Only root has the privilege, and may give it up.
    let may_drop = Command::new("setpriv").args(dropped).arg("true").output();
    let mut command = if may_drop.is_ok_and(|output| output.status.success()) {
        let mut command = Command::new("setpriv");
        command.args(dropped).arg("prlimit");
        command
    } else {
        Command::new("prlimit")
    };
    command
        .arg(limit)
        .arg(env!("CARGO_BIN_EXE_hotpin"))
        .args(args)
        .stdin(Stdio::null());
    clean(&mut command);
    command
}

/// Copies of program and model that every user may read.
pub struct ForEverybody {
    _folder: tempfile::TempDir,
    program: PathBuf,
    pub model: PathBuf,
}

pub fn for_everybody(model: &Path) -> ForEverybody {
    let folder = tempfile::tempdir_in("/var/tmp").expect("temp dir");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.path(), open).expect("permissions");
    let (program, copy) = (folder.path().join("hotpin"), folder.path().join("m.gguf"));
    fs::copy(env!("CARGO_BIN_EXE_hotpin"), &program).expect("copy");
    fs::copy(model, &copy).expect("copy");
    ForEverybody {
        _folder: folder,
        program,
        model: copy,
    }
}

impl ForEverybody {
    /// The program, run by root as an ordinary user without any privilege, who may lock so much.
    pub fn as_nobody(&self, memlock_bytes: u64, args: &[String]) -> Command {
        let mut nobody = Command::new("setpriv");
        nobody
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(["--inh-caps=-all", "--bounding-set=-all"])
            .args([
                "prlimit",
                &format!("--memlock={memlock_bytes}:{memlock_bytes}"),
            ])
            .arg(&self.program)
            .args(args)
            .stdin(Stdio::null())
            .current_dir("/");
        clean(&mut nobody);
        nobody
    }
}

/// Goes on in a process of its own, where what is locked is nobody else's: true there, and false where that has
/// been run to its end. `with` is a command that runs it.
pub fn alone_in_process(name: &str, with: &[&str]) -> bool {
    const CHILD: &str = "HOTPIN_TEST_CHILD";
    if std::env::var(CHILD).is_ok_and(|child| child == name) {
        return true;
    }
    let this = std::env::current_exe().expect("this program");
    let words = with.iter().map(OsStr::new);
    let mut command = words.chain([this.as_os_str()]);
    let mut child = Command::new(command.next().expect("a program"));
    let ran = child
        .args(command)
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, name)
        .output()
        .expect("start");
    let said = [ran.stdout, ran.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let passed = ran.status.success() && said[0].contains("1 passed");
    assert!(passed, "{}\n{}", said[0], said[1]);
    eprint!("{}", said[1]);
    false
}

/// Bytes that the kernel cannot reclaim from a memory cgroup, version 1 or 2.
pub fn unevictable_bytes(join: &CgroupJoin) -> u64 {
    let stat = fs::read_to_string(join.procs.with_file_name("memory.stat")).expect("stat");
    stat.lines()
        .find_map(|line| line.strip_prefix("unevictable ")?.parse().ok())
        .expect("unevictable")
}

/// The command, in a cgroup from its first instruction on.
pub fn within(join: &CgroupJoin, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", r#"echo $$ > "$0" && exec "$@""#])
        .arg(&join.procs)
        .arg(command.get_program())
        .args(command.get_args());
    clean(&mut shell);
    shell
}

/// A copy of a model beside it, so that it lies on the same file system, not in the page cache.
pub struct Copy {
    pub folder: tempfile::TempDir,
    pub model: PathBuf,
}

impl Copy {
    pub fn of(model: &Path) -> Self {
        let folder = tempfile::tempdir_in(model.parent().expect("folder")).expect("temp dir");
        let copy = folder.path().join("m.gguf");
        fs::copy(model, &copy).expect("copy");
        let this = Self {
            folder,
            model: copy,
        };
        this.evict();
        this
    }

    /// Drops the copy from the page cache.
    pub fn evict(&self) {
        evict(&self.model);
    }
}

/// Drops a file that nobody maps from the page cache.
pub fn evict(path: &Path) {
    let file = fs::File::open(path).expect("open");
    file.sync_all().expect("sync");
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("evict");
}

/// A number from the environment, for the long form of a test.
pub fn from_environment(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(default, |text| {
        text.parse().unwrap_or_else(|e| panic!("{name}: {e}"))
    })
}

/// A profile of the model in which every layer's low indices are hot.
pub fn low_profile(map: &ModelMap) -> Profile {
    let experts = u64::from(map.layers()[0].experts);
    let counts: Vec<u64> = (0..map.shape().total_experts() as u64)
        .map(|i| 1000 / (1 + i % experts))
        .collect();
    Profile::new(map, &counts, 1000)
}

/// Small numbers from a seed.
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % n as u64).expect("small")
    }
}

/// Whether this is root, as most faults can only be made by; said when not.
pub fn root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED {test}: it needs root");
    }
    root
}

/// A memory cgroup's parent; `None`, said, where none can be made.
pub fn cgroups(test: &str) -> Option<CgroupParent> {
    CgroupParent::find(Path::new("/"))
        .map_err(|error| eprintln!("SKIPPED {test}: {error}"))
        .ok()
}

/// Gives the arguments of [`greedy`] room for a long answer.
pub fn with_context(mut args: Vec<String>) -> Vec<String> {
    let context = args.iter().position(|arg| arg == "256").expect("context");
    args[context] = "4096".into();
    args
}

/// A run that has begun to answer.
pub struct Answering {
    child: Child,
    before: String,
}

impl Answering {
    /// Starts it and waits until it has said so many bytes.
    pub fn begin(mut command: Command, bytes: usize) -> Self {
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start");
        let mut this = Self {
            child,
            before: String::new(),
        };
        this.read(bytes);
        this
    }

    fn read(&mut self, bytes: usize) {
        let mut more = vec![0; bytes];
        let stdout = self.child.stdout.as_mut().expect("stdout");
        stdout.read_exact(&mut more).expect("an answer goes on");
        self.before += &String::from_utf8_lossy(&more);
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Bytes of the model that it has locked.
    pub fn locked(&self) -> u64 {
        locked_by(self.id())
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.id()).expect("pid"));
        nix::sys::signal::kill(pid, signal).expect("signal");
    }

    /// Waits for its end. The text is all that it said.
    pub fn ended(self) -> Ran {
        let mut ran = Ran::of(&self.child.wait_with_output().expect("wait"));
        ran.stdout.insert_str(0, &self.before);
        ran
    }

    /// Sees it go on for so many bytes, and kills it. Returns all that it said.
    pub fn cut_off(mut self, bytes: usize) -> String {
        self.read(bytes);
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        self.before
    }
}
