//! What the bench's parent and its child say to each other.
//!
//! The parent starts `hotpin bench-child`, writes one [`ChildRequest`] to its stdin and closes it.
//! The child writes progress lines to stderr and one line of JSON to stdout: a [`ChildResult`], or,
//! when it exits non-zero, a [`ChildError`].

use std::path::PathBuf;

use super::perplexity::Perplexity;
use super::roofline::Roofline;
use super::shaken::Shaken;
use super::tier::Tier;
use serde::{Deserialize, Serialize};

/// What a child decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Teacher forcing: the tokens of the workload's texts, one by one.
    Forced,
    /// Free-running greedy generation from each prompt.
    Generate,
    /// The likelihood of the workload's texts, in chunks of the context.
    Perplexity,
}

/// One text of the workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkloadText {
    /// The domain's name; the child's segment bears it.
    pub name: String,
    /// File with the text, UTF-8.
    pub path: PathBuf,
}

/// The cgroup that a child joins before it opens the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CgroupJoin {
    /// 1 or 2.
    pub version: u8,
    /// The `cgroup.procs` file to write the pid to.
    pub procs: PathBuf,
}

/// One run, as the parent orders it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChildRequest {
    /// The model's first shard.
    pub model: PathBuf,
    /// Policy, as `--policy` names it.
    pub policy: String,
    /// Store, as `--store` names it.
    pub store: String,
    /// Texts for [`Task::Forced`], in the order to decode them.
    pub workload: Vec<WorkloadText>,
    /// Tokens to decode for each text or prompt.
    pub tokens: u32,
    /// Tokens decoded before those in each text, hashed and not timed.
    #[serde(default)]
    pub warmup_tokens: u32,
    /// Profile to start from.
    pub profile: Option<PathBuf>,
    /// Limit of the cgroup in bytes; none: no limit.
    pub memory_bytes: Option<u64>,
    /// The cgroup to join.
    pub cgroup: Option<CgroupJoin>,
    /// Compute threads.
    pub threads: u32,
    /// Where to write the trace of the run.
    pub record: Option<PathBuf>,
    /// Where to write the journal of decisions.
    pub journal: Option<PathBuf>,
    /// What to decode.
    pub task: Task,
    /// Chunks of each text for [`Task::Perplexity`]; none: all.
    #[serde(default)]
    pub chunks: Option<u32>,
    /// Prompts for [`Task::Generate`]; segments are named `prompt-1` and on.
    pub prompts: Vec<String>,
    /// Engine settings that the parent passes on unread.
    pub engine: serde_json::Value,
}

/// One domain or prompt, as the child measured it. None: unknown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SegmentResult {
    /// Domain, or `prompt-N`.
    pub name: String,
    /// Tokens decoded.
    pub tokens: u32,
    /// Time to decode them in seconds.
    pub seconds: f64,
    /// Tokens a second.
    pub tok_s: f64,
    /// Part of routed experts that were resident when routed.
    pub hit_ratio: Option<f64>,
    /// Part of routed experts that were locked when routed.
    pub pinned_hit_ratio: Option<f64>,
    /// Bytes read from the disk per token.
    pub read_bytes_per_token: Option<f64>,
    /// Stall per token in milliseconds.
    pub stall_ms_per_token: Option<f64>,
    /// Major page faults per token.
    pub major_faults_per_token: Option<f64>,
    /// Of [`Task::Perplexity`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<Perplexity>,
}

/// One run, as the child measured it. None: unknown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChildResult {
    /// The policy that ran.
    pub policy: String,
    /// The store that ran (`auto` resolved).
    pub store: String,
    /// Time to load the model in seconds.
    pub load_s: Option<f64>,
    /// Time to the first token in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Highest memory use in bytes; the parent's own reading of the cgroup replaces it.
    pub peak_memory_bytes: Option<u64>,
    /// Bytes locked at the end of the run.
    pub pinned_bytes: Option<u64>,
    /// Bytes of the model in the page cache when the run began; the parent's reading replaces it.
    pub resident_at_start_bytes: Option<u64>,
    /// One for each text or prompt, in order.
    pub segments: Vec<SegmentResult>,
    /// Hash over the logits of every token, hex.
    pub logits_sha256: Option<String>,
    /// Capacity at the end of the run in bytes.
    pub capacity_bytes: Option<u64>,
    /// How close it came to what its disk and cores allow; of store `direct`.
    #[serde(default)]
    pub roofline: Option<Roofline>,
    /// What its pool of experts in a device's memory did, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram: Option<Tier>,
    /// What random changes of capacity came to, where they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shaken: Option<Shaken>,
    /// What the reader of the figures has to know.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// What a child that failed says on stdout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildError {
    /// What was wrong, in words for the user.
    pub error: String,
}

/// Why a child's result was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ResultError {
    /// Not the JSON that was agreed.
    #[error("its result is not valid: {0}")]
    Json(String),
    /// It ran something else than what was asked.
    #[error("it ran policy `{got}` where `{asked}` was asked for")]
    Policy {
        /// Ordered.
        asked: String,
        /// Reported.
        got: String,
    },
    /// The segments are not the ones that were asked.
    #[error("it decoded {got:?} where {asked:?} was asked for")]
    Segments {
        /// Ordered.
        asked: Vec<String>,
        /// Reported.
        got: Vec<String>,
    },
    /// Forced work is the same for every policy, or speeds cannot be compared.
    #[error("segment `{segment}` decoded {got} tokens where {asked} were asked for")]
    Tokens {
        /// Which segment.
        segment: String,
        /// Ordered.
        asked: u32,
        /// Reported.
        got: u32,
    },
    /// A figure that cannot be one.
    #[error("segment `{segment}` has {what} = {value}")]
    Figure {
        /// Which segment.
        segment: String,
        /// Which figure.
        what: &'static str,
        /// Its value.
        value: f64,
    },
}

impl ChildRequest {
    /// Names of the segments that the child has to report, in order.
    #[must_use]
    pub fn segment_names(&self) -> Vec<String> {
        match self.task {
            Task::Forced | Task::Perplexity => {
                self.workload.iter().map(|text| text.name.clone()).collect()
            }
            Task::Generate => (1..=self.prompts.len())
                .map(|n| format!("prompt-{n}"))
                .collect(),
        }
    }

    /// Reads the child's line and checks it against this request.
    ///
    /// # Errors
    /// [`ResultError`] says what does not fit.
    pub fn accept(&self, line: &str) -> Result<ChildResult, ResultError> {
        let result: ChildResult =
            serde_json::from_str(line).map_err(|error| ResultError::Json(error.to_string()))?;
        if result.policy != self.policy {
            return Err(ResultError::Policy {
                asked: self.policy.clone(),
                got: result.policy,
            });
        }
        let asked = self.segment_names();
        let got: Vec<String> = result.segments.iter().map(|s| s.name.clone()).collect();
        if got != asked {
            return Err(ResultError::Segments { asked, got });
        }
        result
            .segments
            .iter()
            .try_for_each(|segment| self.check_tokens(segment))?;
        result.segments.iter().try_for_each(check_figures)?;
        Ok(result)
    }

    /// Generation may end early, at the end of its text; teacher forcing may not.
    fn check_tokens(&self, segment: &SegmentResult) -> Result<(), ResultError> {
        let (asked, got) = (self.tokens, segment.tokens);
        let fits = match self.task {
            Task::Forced => got == asked,
            Task::Generate => got <= asked,
            Task::Perplexity => got > 0,
        };
        if fits {
            return Ok(());
        }
        Err(ResultError::Tokens {
            segment: segment.name.clone(),
            asked,
            got,
        })
    }
}

fn check_figures(segment: &SegmentResult) -> Result<(), ResultError> {
    let refuse = |what, value| ResultError::Figure {
        segment: segment.name.clone(),
        what,
        value,
    };
    let positive = [
        ("tokens", f64::from(segment.tokens)),
        ("seconds", segment.seconds),
        ("tok_s", segment.tok_s),
    ];
    for (what, value) in positive {
        if !(value.is_finite() && value > 0.0) {
            return Err(refuse(what, value));
        }
    }
    let ratios = [
        ("hit_ratio", segment.hit_ratio),
        ("pinned_hit_ratio", segment.pinned_hit_ratio),
    ];
    for (what, value) in ratios {
        if let Some(value) = value.filter(|value| !(0.0..=1.0).contains(value)) {
            return Err(refuse(what, value));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn request() -> ChildRequest {
        let text = |name: &str| WorkloadText {
            name: name.into(),
            path: "x.txt".into(),
        };
        ChildRequest {
            model: "m.gguf".into(),
            policy: "off".into(),
            store: "mapped".into(),
            workload: vec![text("prose"), text("rust")],
            tokens: 150,
            warmup_tokens: 0,
            profile: None,
            memory_bytes: None,
            cgroup: None,
            threads: 2,
            record: None,
            journal: None,
            task: Task::Forced,
            chunks: None,
            prompts: Vec::new(),
            engine: serde_json::Value::Null,
        }
    }

    fn line(policy: &str, names: [&str; 2], tok_s: f64, hit: &str) -> String {
        let segment = |name: &str| {
            format!(
                r#"{{"name":"{name}","tokens":150,"seconds":10.0,"tok_s":{tok_s:?},"hit_ratio":{hit},
                "pinned_hit_ratio":null,"read_bytes_per_token":null,"stall_ms_per_token":null,
                "major_faults_per_token":null}}"#
            )
        };
        format!(
            r#"{{"policy":"{policy}","store":"mapped","load_s":1.0,"ttft_ms":null,
            "peak_memory_bytes":null,"pinned_bytes":null,"resident_at_start_bytes":null,
            "segments":[{},{}],"logits_sha256":"ab","capacity_bytes":null}}"#,
            segment(names[0]),
            segment(names[1])
        )
    }

    #[test]
    fn what_was_asked_is_accepted() {
        let result = request().accept(&line("off", ["prose", "rust"], 15.0, "0.5"));
        let result = result.expect("accepted");
        assert_eq!(result.segments[1].hit_ratio, Some(0.5));
        assert_eq!(result.pinned_bytes, None);
    }

    #[test]
    fn anything_else_is_refused() {
        let check = |line: &str, expect: &str| {
            let error = request().accept(line).expect_err("refused").to_string();
            assert!(error.contains(expect), "{error}");
        };
        check(
            &line("lru", ["prose", "rust"], 15.0, "0.5"),
            "policy `lru` where `off`",
        );
        check(&line("off", ["rust", "prose"], 15.0, "0.5"), "decoded");
        check(&line("off", ["prose", "rust"], 0.0, "0.5"), "tok_s = 0");
        check(
            &line("off", ["prose", "rust"], 15.0, "1.5"),
            "hit_ratio = 1.5",
        );
        let mut other = request();
        other.tokens = 200;
        let error = other.accept(&line("off", ["prose", "rust"], 15.0, "0.5"));
        let error = error.expect_err("too few").to_string();
        assert!(error.contains("decoded 150 tokens where 200"), "{error}");
        check("{}", "not valid");
        check("", "not valid");
    }

    #[test]
    fn a_request_survives_the_wire() {
        let mut request = request();
        request.cgroup = Some(CgroupJoin {
            version: 1,
            procs: "/sys/fs/cgroup/x".into(),
        });
        let text = serde_json::to_string(&request).expect("json");
        assert!(text.contains(r#""task":"forced""#) && text.contains(r#""profile":null"#));
        assert_eq!(
            serde_json::from_str::<ChildRequest>(&text).expect("back"),
            request
        );
    }
}
