//! One run after another: cold start, cgroup, child, and what the parent measured itself.

use serde::{Deserialize, Serialize};

use super::cgroup::{CgroupError, CgroupParent, RunCgroup};
use super::child::{Interrupts, RunFailure, run_child};
use super::plan::Plan;
use super::progress::Progress;
use super::protocol::{ChildRequest, ChildResult};
use super::residency::{StartState, make_cold, measure};
use super::{BenchError, Hooks};

/// The figures of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Repeat, from 1.
    pub repeat: u32,
    /// Place in the order of runs, from 1.
    pub order: u32,
    /// Tokens a second over all segments.
    pub total_tok_s: f64,
    /// What the child reported, with the parent's own readings in it.
    #[serde(flatten)]
    pub result: ChildResult,
}

impl Sample {
    fn new(repeat: u32, order: u32, result: ChildResult) -> Self {
        let tokens: f64 = result.segments.iter().map(|s| f64::from(s.tokens)).sum();
        let seconds: f64 = result.segments.iter().map(|s| s.seconds).sum();
        Self {
            repeat,
            order,
            total_tok_s: tokens / seconds,
            result,
        }
    }
}

/// A run that gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The others may go on.
    #[error(transparent)]
    Failed(#[from] RunFailure),
    /// Nothing can go on.
    #[error(transparent)]
    Stop(#[from] BenchError),
}

/// What all runs share.
#[derive(Debug)]
pub struct Session<'a> {
    plan: &'a Plan,
    hooks: &'a Hooks<'a>,
    place: Option<CgroupParent>,
    interrupts: Interrupts,
    notes: Vec<String>,
    runs: u32,
}

impl<'a> Session<'a> {
    /// Makes ready. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BenchError::NoLimit`] when a limit is asked for and no cgroup can be made.
    pub fn open(plan: &'a Plan, hooks: &'a Hooks<'a>) -> Result<Self, BenchError> {
        let mut notes = Vec::new();
        let place = match plan
            .memory_bytes
            .map(|_| CgroupParent::find(&hooks.system_root))
        {
            None => None,
            Some(Ok(place)) => Some(place),
            Some(Err(error)) if plan.no_cgroup => {
                notes.push(format!("NO MEMORY LIMIT, as --no-cgroup allows: {error}"));
                None
            }
            Some(Err(error)) => return Err(BenchError::NoLimit(error)),
        };
        let interrupts = Interrupts::listen().map_err(BenchError::Signals)?;
        Ok(Self {
            plan,
            hooks,
            place,
            interrupts,
            notes,
            runs: 0,
        })
    }

    /// True when runs are held to their limit.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.place.is_some()
    }

    /// What the reader of the figures has to know, each thing once.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Adds a note, once.
    pub fn note(&mut self, text: String) {
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Runs `policy` once within `memory_bytes`. `label` names the run in file names.
    ///
    /// # Errors
    /// [`RunError`] tells whether others may go on.
    pub async fn run(
        &mut self,
        policy: &str,
        repeat: u32,
        memory_bytes: Option<u64>,
        progress: &mut Progress,
    ) -> Result<Sample, RunError> {
        let start = self.prepare().await?;
        self.runs += 1;
        let cgroup = self.make_group(memory_bytes)?;
        let request = self.request(policy, repeat, memory_bytes, cgroup.as_ref());
        let mut result = run_child(
            &self.hooks.child,
            &request,
            cgroup.as_ref(),
            self.plan.timeout,
            &mut self.interrupts,
            &mut |line| progress.child_line(line),
        )
        .await
        .map_err(|failure| match failure {
            RunFailure::Interrupted { signal } => RunError::Stop(BenchError::Interrupted(signal)),
            other => RunError::Failed(other),
        })?;
        if let Some(group) = &cgroup {
            self.read_group(group, &mut result)?;
        }
        result.resident_at_start_bytes = start.resident_bytes();
        for note in result.notes.clone() {
            self.note(format!("{policy}: {note}"));
        }
        Ok(Sample::new(repeat, self.runs, result))
    }

    async fn prepare(&mut self) -> Result<StartState, BenchError> {
        let shards = &self.plan.shards;
        let state = if self.plan.warm {
            measure(shards)?
        } else {
            tokio::select! {
                state = make_cold(shards) => state?,
                signal = self.interrupts.next() => return Err(BenchError::Interrupted(signal)),
            }
        };
        if let StartState::Unknown { reason } = &state {
            self.note(format!("whether runs started cold is unknown: {reason}"));
        }
        Ok(state)
    }

    fn make_group(&mut self, memory_bytes: Option<u64>) -> Result<Option<RunCgroup>, BenchError> {
        let (Some(place), Some(bytes)) = (&self.place, memory_bytes) else {
            return Ok(None);
        };
        let group = place.run_group(bytes).map_err(|error| match error {
            CgroupError::TighterAbove { .. } => BenchError::Usage(error.to_string()),
            other => BenchError::NoLimit(other),
        })?;
        for note in group.notes() {
            self.note(note.clone());
        }
        Ok(Some(group))
    }

    /// The kernel's own peak counts page cache and every process of the run, so it replaces the
    /// child's.
    fn read_group(&mut self, group: &RunCgroup, result: &mut ChildResult) -> Result<(), RunError> {
        match group.peak_bytes() {
            Some(0) => {
                let what = "it never joined its cgroup, so no limit held".to_owned();
                return Err(RunFailure::Protocol {
                    what,
                    tail: String::new(),
                }
                .into());
            }
            Some(bytes) => result.peak_memory_bytes = Some(bytes),
            None => self.note("the kernel keeps no peak of a cgroup's memory".to_owned()),
        }
        Ok(())
    }

    fn request(
        &self,
        policy: &str,
        repeat: u32,
        memory_bytes: Option<u64>,
        cgroup: Option<&RunCgroup>,
    ) -> ChildRequest {
        let plan = self.plan;
        let number = self.runs;
        let name = |extension| format!("{number:03}-{policy}-{repeat}.{extension}");
        ChildRequest {
            model: plan.model.clone(),
            policy: policy.to_owned(),
            store: plan.store.clone(),
            workload: plan.workload.clone(),
            tokens: plan.tokens,
            warmup_tokens: plan.warmup_tokens,
            chunks: plan.chunks,
            profile: plan.profile.clone(),
            memory_bytes,
            cgroup: cgroup.map(RunCgroup::join),
            threads: plan.threads,
            record: plan.record.as_ref().map(|dir| dir.join(name("trace"))),
            journal: plan.journal.as_ref().map(|dir| dir.join(name("jsonl"))),
            task: plan.task,
            prompts: plan.prompts.clone(),
            engine: plan.engine.clone(),
        }
    }
}
