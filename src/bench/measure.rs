//! The child's half of a benchmark: one policy, measured.
//!
//! Only decodes are timed. Between them every token's logits are hashed, so that runs can be
//! compared bit by bit without the hash costing any of them time. (Where a text is scored, a whole
//! chunk is one decode, and its scores and hashes are part of its time.)

use super::perplexity::{Chunks, Score, score_chunk};
use super::protocol::{ChildError, ChildRequest, ChildResult, SegmentResult, Task};
use super::roofline::{Measured, Roofline};
use super::shaken::{Shaking, shake};
use super::tier::Tier;
use crate::config::args::DeviceArgs;
use crate::engine::{EngineOptions, Model, Session, Token};
use crate::governor::{Journal, JournalFile, OnFailure};
use crate::model::ModelMap;
use crate::plant::{Rig, RigOptions, Totals, VramOptions};
use crate::profile::Profile;
use crate::sensors::{Roots, Sample, Sensors};
use crate::store::{DirectOptions, StoreKind};
use crate::time::{millis, nanos};
use crate::trace::Recorder;
use anyhow::{Context, Result, bail};
use hotpin_controllers::{AdaptiveConfig, ModelShape, Moment, PolicyKind};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Settings that the parent passes on unread.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Passed {
    /// Engine settings; the thread count of the request replaces theirs.
    pub engine: EngineOptions,
    /// Settings of the control laws.
    pub control: AdaptiveConfig,
    /// Time between ticks, milliseconds.
    pub tick_ms: u64,
    /// Compare every expert that is read with the file (store `direct`).
    pub verify: bool,
    /// Seed of random changes of capacity, where it is to change.
    pub random_capacity: Option<u64>,
    /// What is on a graphics device.
    pub device: DeviceArgs,
}

impl Default for Passed {
    fn default() -> Self {
        Self {
            engine: EngineOptions::default(),
            control: AdaptiveConfig::default(),
            tick_ms: 100,
            verify: false,
            random_capacity: None,
            device: DeviceArgs::default(),
        }
    }
}

/// Reads one request from stdin, carries it out, and prints one line of JSON.
#[must_use]
pub fn execute() -> ExitCode {
    let outcome = request().and_then(|request| run(&request));
    let mut out = std::io::stdout().lock();
    let (line, code) = match outcome {
        Ok(result) => (serde_json::to_string(&result), ExitCode::SUCCESS),
        Err(error) => {
            let error = ChildError {
                error: format!("{error:#}"),
            };
            (serde_json::to_string(&error), ExitCode::FAILURE)
        }
    };
    match line.map(|line| writeln!(out, "{line}")) {
        Ok(Ok(())) => code,
        _ => ExitCode::FAILURE,
    }
}

fn request() -> Result<ChildRequest> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .context("reading the request")?;
    serde_json::from_str(&text).context("the request is not valid")
}

fn run(request: &ChildRequest) -> Result<ChildResult> {
    if let Some(cgroup) = &request.cgroup {
        std::fs::write(&cgroup.procs, std::process::id().to_string())
            .with_context(|| format!("joining {}", cgroup.procs.display()))?;
    }
    let started = Instant::now();
    let map = ModelMap::open(&request.model)?;
    let passed = passed(request)?;
    let random_capacity = passed.random_capacity;
    let placement = passed.device.placement(&map);
    let options = rig_options(request, &map, passed)?;
    let policy = options.policy;
    let model = if policy == PolicyKind::Off || !map.is_moe() {
        Model::load_placed(map.path(), placement, |_| true)
    } else {
        Model::open_placed(map.path(), placement, |_| true)
    }?;
    let mut rig = Rig::assemble(&model, &map, options, &mut |_, _| {})?;
    let load_s = started.elapsed().as_secs_f64();
    // Under `off` and for dense models there is nothing to change.
    let seed = random_capacity.filter(|_| rig.governor.is_some());
    let expert_bytes = map.shape().total_bytes();
    let shaking = seed.map(|seed| shake(&rig, expert_bytes, seed));
    let shaking = shaking.transpose()?;
    let mut meter = Meter::new();
    let mut segments = Vec::new();
    for (name, work) in works(request, &model, rig.session.n_ctx())? {
        // Without a parent that listens, the run goes on.
        let _ = writeln!(std::io::stderr(), "{policy}: {name}");
        segments.push(meter.segment(&mut rig, policy, name, &work, request)?);
    }
    let shaken = shaking.map(Shaking::end).transpose()?;
    let mut result = meter.result(request, &mut rig, map.shape(), segments, load_s)?;
    result
        .notes
        .extend(shaken.map(|s| format!("`{policy}`: {s}")));
    Ok(ChildResult { shaken, ..result })
}

fn passed(request: &ChildRequest) -> Result<Passed> {
    if request.engine.is_null() {
        return Ok(Passed::default());
    }
    let passed: Passed =
        serde_json::from_value(request.engine.clone()).context("engine settings of the request")?;
    passed.device.check()?;
    Ok(passed)
}

fn rig_options(request: &ChildRequest, map: &ModelMap, passed: Passed) -> Result<RigOptions> {
    let store = <StoreKind as clap::ValueEnum>::from_str(&request.store, false)
        .map_err(|e| anyhow::anyhow!("--store {}: {e}", request.store))?;
    let profile = match &request.profile {
        Some(path) => Some(Profile::load(path, map)?.counts()),
        None => None,
    };
    let recorder = request
        .record
        .as_deref()
        .map(|path| Recorder::create(path, map))
        .transpose()?;
    let journal = request
        .journal
        .as_deref()
        .map(JournalFile::create)
        .transpose()?;
    let engine = EngineOptions {
        threads: request.threads,
        ..passed.engine
    };
    Ok(RigOptions {
        direct: DirectOptions {
            verify: passed.verify,
            ..DirectOptions::default()
        },
        control: passed.control,
        profile,
        tick: Duration::from_millis(passed.tick_ms),
        journal: Journal::new(journal),
        recorder,
        // A run that is not regulated as it should be is no figure.
        on_failure: OnFailure::Stop,
        keep_program: true,
        vram: VramOptions {
            size: passed.device.vram(),
            moves: false,
            source: None,
        },
        ..RigOptions::new(request.policy.parse::<PolicyKind>()?, store, engine)
    })
}

/// What one segment decodes.
enum Work {
    /// These tokens, one by one.
    Forced(Vec<Token>),
    /// The likeliest tokens after this prompt.
    Generate(Vec<Token>),
    /// The likelihood of these chunks.
    Score(Chunks),
}

fn works(request: &ChildRequest, model: &Model, n_ctx: usize) -> Result<Vec<(String, Work)>> {
    let names = request.segment_names();
    let wanted = request.tokens as usize + request.warmup_tokens as usize;
    let works: Result<Vec<Work>> = match request.task {
        Task::Forced => request
            .workload
            .iter()
            .map(|text| {
                let content = std::fs::read_to_string(&text.path)
                    .with_context(|| text.path.display().to_string())?;
                let mut tokens = model.tokenize(&content, false, false)?;
                if tokens.len() < wanted {
                    bail!(
                        "{} has {} tokens, {wanted} were asked for",
                        text.path.display(),
                        tokens.len()
                    );
                }
                tokens.truncate(wanted);
                Ok(Work::Forced(tokens))
            })
            .collect(),
        Task::Perplexity => request
            .workload
            .iter()
            .map(|text| {
                let place = || text.path.display().to_string();
                let content = std::fs::read_to_string(&text.path).with_context(place)?;
                let chunks = Chunks::of(model, &content, n_ctx, request.chunks);
                Ok(Work::Score(chunks.with_context(place)?))
            })
            .collect(),
        Task::Generate => request
            .prompts
            .iter()
            .map(|prompt| Ok(Work::Generate(model.chat_tokens(None, prompt)?)))
            .collect(),
    };
    Ok(names.into_iter().zip(works?).collect())
}

/// Running measurements of one child.
struct Meter {
    sensors: Sensors,
    started: Instant,
    hash: Sha256,
    first_token_ms: Option<f64>,
}

impl Meter {
    fn new() -> Self {
        Self {
            sensors: Sensors::open(&Roots::default(), Moment { ns: 0 }),
            started: Instant::now(),
            hash: Sha256::new(),
            first_token_ms: None,
        }
    }

    fn sample(&mut self) -> Sample {
        let ns = nanos(self.started.elapsed());
        self.sensors.sample(Moment { ns })
    }

    /// Decodes one token and hashes its logits; returns the time of the decode alone.
    fn step(&mut self, session: &mut Session<'_>, tokens: &[Token]) -> Result<Duration> {
        let began = Instant::now();
        session.decode(tokens)?;
        let took = began.elapsed();
        self.first_token_ms.get_or_insert(took.as_secs_f64() * 1e3);
        for logit in session.logits() {
            self.hash.update(logit.to_bits().to_le_bytes());
        }
        Ok(took)
    }

    fn segment(
        &mut self,
        rig: &mut Rig<'_>,
        policy: PolicyKind,
        name: String,
        work: &Work,
        request: &ChildRequest,
    ) -> Result<SegmentResult> {
        rig.session.clear();
        if let Some(recording) = &rig.recording {
            recording.prompt(name.as_str());
        }
        let mut tokens = request.tokens;
        let mut score = Score::default();
        if let Work::Forced(forced) = work {
            for &token in &forced[..request.warmup_tokens as usize] {
                self.step(&mut rig.session, &[token])?;
            }
        }
        let before = (self.sample(), rig.counters.totals());
        let mut spent = Duration::ZERO;
        match work {
            Work::Forced(forced) => {
                for &token in &forced[request.warmup_tokens as usize..] {
                    spent += self.step(&mut rig.session, &[token])?;
                }
            }
            Work::Score(chunks) => {
                tokens = 0;
                for chunk in chunks.iter() {
                    let began = Instant::now();
                    let hash = &mut self.hash;
                    score_chunk(&mut rig.session, &chunk, &mut score, &mut |logits| {
                        for logit in logits {
                            hash.update(logit.to_bits().to_le_bytes());
                        }
                    })?;
                    spent += began.elapsed();
                    tokens += u32::try_from(chunks.length())?;
                }
            }
            Work::Generate(prompt) => {
                spent += self.step(&mut rig.session, prompt)?;
                for _ in 0..tokens {
                    let token = likeliest(rig.session.logits());
                    spent += self.step(&mut rig.session, &[token])?;
                }
            }
        }
        let after = (self.sample(), rig.counters.totals());
        let known = rig.store_kind == StoreKind::Direct
            || matches!(policy, PolicyKind::Adaptive | PolicyKind::Lru);
        let measured = segment_result(name, policy, known, tokens, spent, &before, &after);
        Ok(SegmentResult {
            perplexity: score.perplexity(),
            ..measured
        })
    }

    fn result(
        mut self,
        request: &ChildRequest,
        rig: &mut Rig<'_>,
        shape: &ModelShape,
        segments: Vec<SegmentResult>,
        load_s: f64,
    ) -> Result<ChildResult> {
        let status = rig.governor.as_ref().map(crate::governor::Governor::status);
        let mut sha = String::new();
        for byte in std::mem::take(&mut self.hash).finalize() {
            let _ = write!(sha, "{byte:02x}");
        }
        let mut notes = rig.notes.clone();
        if let Some(failed) = status.as_ref().and_then(|s| s.failed.clone()) {
            notes.push(failed);
        }
        let regulated = status.as_ref().and_then(|status| {
            let last = status.entry.as_ref()?.vram.as_ref()?;
            let tokens = rig.session.decoded_tokens();
            Some(Tier::of(last, status.vram_changes, tokens))
        });
        let fixed = rig.end_fixed_pool()?;
        Ok(ChildResult {
            policy: request.policy.clone(),
            store: rig.store_kind.label().into(),
            load_s: Some(load_s),
            ttft_ms: self.first_token_ms,
            peak_memory_bytes: self.sample().resident_bytes,
            pinned_bytes: status.as_ref().map(|s| s.pinned_bytes),
            resident_at_start_bytes: None,
            segments,
            logits_sha256: Some(sha),
            capacity_bytes: status.as_ref().map(|s| s.decision.capacity_bytes),
            roofline: roofline(rig, shape),
            vram: regulated.or_else(|| fixed.as_ref().map(Tier::of_pool)),
            shaken: None,
            notes,
        })
    }
}

/// The run's roofline, where the store and the engine know enough for one.
#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn roofline(rig: &Rig<'_>, shape: &ModelShape) -> Option<Roofline> {
    let totals = rig.counters.totals();
    let used = rig.session.arena_use().filter(|used| used.split_rows > 0)?;
    let learned = rig.session.learned()?;
    // The time of prompts is not told apart.
    if totals.prefill_tokens > 0 {
        return None;
    }
    Roofline::of(&Measured {
        tokens: totals.decode_tokens,
        decode_ns: totals.decode_ns,
        stall_ns: totals.stall_ns,
        missed: &rig.counters.missed(),
        expert_bytes: shape.total_bytes() as f64 / shape.total_experts().max(1) as f64,
        top_k: learned.top_k as f64,
        expert_ns: used.split_ns as f64 / used.split_rows as f64,
        bandwidth: rig.store.as_ref()?.read_bandwidth()?,
    })
}

fn likeliest(logits: &[f32]) -> Token {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .map_or(0, |(index, _)| index);
    Token::try_from(best).unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn segment_result(
    name: String,
    policy: PolicyKind,
    residency_known: bool,
    tokens: u32,
    spent: Duration,
    before: &(Sample, Totals),
    after: &(Sample, Totals),
) -> SegmentResult {
    let n = f64::from(tokens);
    let change = after.1.since(&before.1);
    let routed = (change.hits + change.misses) as f64;
    // Where the kernel keeps transit, only what is locked is known to be resident.
    let books = residency_known && routed > 0.0;
    let tapped = policy != PolicyKind::Off && routed > 0.0;
    let per_token =
        |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?) as f64 / n);
    let seconds = spent.as_secs_f64();
    SegmentResult {
        name,
        tokens,
        seconds,
        tok_s: n / seconds.max(1e-9),
        hit_ratio: books.then(|| change.hits as f64 / routed),
        pinned_hit_ratio: tapped.then(|| change.pinned_hits as f64 / routed),
        read_bytes_per_token: per_token(after.0.read_bytes, before.0.read_bytes),
        stall_ms_per_token: tapped.then(|| millis(change.stall_ns) / n),
        major_faults_per_token: per_token(
            after.0.faults.map(|f| f.major),
            before.0.faults.map(|f| f.major),
        ),
        perplexity: None,
    }
}
