//! `--learn`: a profile that grows while sessions run, and is where the next one starts.
//!
//! Routings of decoded tokens are counted with weights that halve every [`HALF_LIFE_TOKENS`], over all
//! sessions, so that the file follows its user slowly and no single answer fills it.
#![forbid(unsafe_code)]

use crate::files::folder_of;
use crate::model::ModelMap;
use crate::plant::Counters;
use crate::profile::{Profile, ProfileError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Decoded tokens after which what was learned counts half.
pub const HALF_LIFE_TOKENS: f64 = 8192.0;
/// Time between two saves while tokens are decoded.
pub const SAVE_EVERY: Duration = Duration::from_secs(60);
/// Most damaged files that are kept aside.
const MOST_ASIDE: u32 = 100;

/// Why learning cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// The file is another model's, or cannot be read or written.
    #[error("--learn: {0}")]
    Profile(#[from] ProfileError),
    /// A damaged file could not be moved out of the way.
    #[error("--learn: {why}, and it could not be moved to {aside}: {source}")]
    Aside {
        /// What is wrong with the file.
        why: String,
        /// Where it should have gone.
        aside: PathBuf,
        /// Why it did not.
        source: std::io::Error,
    },
}

/// What was learned so far.
#[derive(Debug)]
pub struct Learner {
    path: PathBuf,
    profile: Profile,
    counts: Vec<f64>,
    tokens: f64,
    seen: Vec<u32>,
    seen_tokens: u64,
}

/// A learner at the start of a session.
#[derive(Debug)]
pub struct Opened {
    /// The learner.
    pub learner: Learner,
    /// Counts to start from, by expert; `None` when nothing was learned yet.
    pub counts: Option<Vec<f32>>,
    /// What the user should know: that a damaged file was set aside.
    pub note: Option<String>,
}

impl Learner {
    /// Reads what earlier sessions learned. A file that is damaged is moved aside, and learning starts
    /// anew; one of another model is refused.
    ///
    /// # Errors
    /// [`LearnError`], see there; also when the file's folder cannot be written.
    pub fn open(path: &Path, map: &ModelMap) -> Result<Opened, LearnError> {
        check_folder(path)?;
        let empty = Profile::new(map, &vec![0; map.shape().total_experts()], 0);
        let (profile, note) = if path.exists() {
            match Profile::load(path, map) {
                Ok(profile) => (profile, None),
                Err(error) if is_damaged(&error) => (empty, Some(set_aside(path, &error)?)),
                Err(error) => return Err(error.into()),
            }
        } else {
            (empty, None)
        };
        let counts = (profile.tokens > 0).then(|| profile.counts());
        #[expect(clippy::cast_precision_loss, reason = "weights; 53 bits suffice")]
        let (weights, tokens) = (
            profile
                .layer
                .iter()
                .flat_map(|layer| layer.counts.iter().map(|&count| count as f64))
                .collect::<Vec<_>>(),
            profile.tokens as f64,
        );
        let learner = Self {
            path: path.to_owned(),
            profile,
            seen: vec![0; weights.len()],
            counts: weights,
            tokens,
            seen_tokens: 0,
        };
        Ok(Opened {
            learner,
            counts,
            note,
        })
    }

    /// Takes in running totals of decoded tokens and of their routings by expert; true when there were
    /// new ones.
    fn absorb(&mut self, tokens: u64, counts: &[u32]) -> bool {
        let new = tokens.saturating_sub(self.seen_tokens);
        if new == 0 {
            return false;
        }
        #[expect(clippy::cast_precision_loss, reason = "tokens of a session")]
        let new = new as f64;
        let keep = (-new / HALF_LIFE_TOKENS).exp2();
        self.tokens = self.tokens * keep + new;
        for ((weight, seen), &count) in self.counts.iter_mut().zip(&mut self.seen).zip(counts) {
            *weight = *weight * keep + f64::from(count.wrapping_sub(*seen));
            *seen = count;
        }
        self.seen_tokens = tokens;
        true
    }

    /// Writes what was learned: all of it or nothing.
    fn save(&mut self) -> Result<(), ProfileError> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "counts are positive, and a cast saturates"
        )]
        let whole = |weight: f64| weight.round() as u64;
        self.profile.tokens = whole(self.tokens).max(1);
        let counts = self.profile.layer.iter_mut().flat_map(|l| &mut l.counts);
        for (count, &weight) in counts.zip(&self.counts) {
            *count = whole(weight);
        }
        self.profile.save(&self.path)
    }

    /// Learns from a session's counters, on a thread of its own, and saves every `every`.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(self, counters: Arc<Counters>, every: Duration) -> std::io::Result<Learning> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("hotpin-learn".into())
            .spawn(move || self.run(&counters, every, &stopped))?;
        Ok(Learning {
            stop,
            thread: Some(thread),
        })
    }

    fn run(
        mut self,
        counters: &Counters,
        every: Duration,
        stop: &(Mutex<bool>, Condvar),
    ) -> Result<(), ProfileError> {
        let mut counts = vec![0; self.counts.len()];
        loop {
            let last = {
                let stopped = stop.0.lock().unwrap_or_else(PoisonError::into_inner);
                *stop
                    .1
                    .wait_timeout_while(stopped, every, |stopped| !*stopped)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            };
            counters.decode_into(&mut counts);
            let saved = if self.absorb(counters.totals().decode_tokens, &counts) {
                self.save()
            } else {
                Ok(())
            };
            if last {
                return saved;
            }
            if let Err(error) = saved {
                tracing::warn!("what was learned could not be saved: {error}");
            }
        }
    }
}

/// A session that is learned from. Dropping it saves, without a word on failure.
#[derive(Debug)]
pub struct Learning {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<Result<(), ProfileError>>>,
}

impl Learning {
    /// Saves for the last time.
    ///
    /// # Errors
    /// When the file could not be written.
    pub fn finish(mut self) -> Result<(), ProfileError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), ProfileError> {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        match self.thread.take() {
            // Nothing in the thread panics on input; if it did, the message is on stderr.
            Some(thread) => thread.join().unwrap_or(Ok(())),
            None => Ok(()),
        }
    }
}

impl Drop for Learning {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// That a folder cannot be written to is found out now, not after days.
fn check_folder(path: &Path) -> Result<(), ProfileError> {
    let folder = folder_of(path);
    // A file without a name, of which a crash leaves nothing.
    tempfile::tempfile_in(folder)
        .map(drop)
        .map_err(|source| ProfileError::Io {
            path: path.to_owned(),
            source,
        })
}

/// Whether the file is no profile at all, in contrast to one that cannot be used here.
fn is_damaged(error: &ProfileError) -> bool {
    match error {
        ProfileError::Malformed { .. } => true,
        ProfileError::Io { source, .. } => source.kind() == std::io::ErrorKind::InvalidData,
        ProfileError::Version { .. } | ProfileError::OtherModel { .. } => false,
    }
}

/// Moves a damaged file to a free name beside it; returns what to tell the user.
fn set_aside(path: &Path, error: &ProfileError) -> Result<String, LearnError> {
    let name = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".damaged-{number}"));
        PathBuf::from(name)
    };
    let aside = (1..MOST_ASIDE)
        .map(name)
        .find(|aside| !aside.exists())
        .unwrap_or_else(|| name(MOST_ASIDE));
    std::fs::rename(path, &aside).map_err(|source| LearnError::Aside {
        why: error.to_string(),
        aside: aside.clone(),
        source,
    })?;
    Ok(format!(
        "--learn: {error}; it was moved to {}, and learning starts anew",
        aside.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::{HALF_LIFE_TOKENS, Learner};
    use crate::profile::Profile;

    fn learner() -> Learner {
        Learner {
            path: "unused".into(),
            profile: Profile {
                version: 1,
                model: "m".into(),
                architecture: "a".into(),
                fingerprint: "f".into(),
                tokens: 0,
                layer: Vec::new(),
            },
            counts: vec![0.0; 2],
            tokens: 0.0,
            seen: vec![0; 2],
            seen_tokens: 0,
        }
    }

    #[test]
    fn what_is_old_counts_half_after_a_half_life() {
        let mut learner = learner();
        assert!(!learner.absorb(0, &[0, 0]), "nothing new");
        assert!(learner.absorb(100, &[100, 0]));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let later = 100 + HALF_LIFE_TOKENS as u32;
        assert!(learner.absorb(later.into(), &[100, later - 100]));
        assert!((learner.counts[0] - 50.0).abs() < 1e-9);
        assert!((learner.counts[1] - HALF_LIFE_TOKENS).abs() < 1e-9);
        assert!((learner.tokens - (50.0 + HALF_LIFE_TOKENS)).abs() < 1e-9);
        assert!(!learner.absorb(later.into(), &[100, later - 100]));
    }

    #[test]
    fn counters_that_wrap_around_are_followed() {
        let mut learner = learner();
        learner.seen = vec![u32::MAX - 1, 0];
        learner.absorb(4, &[2, 0]);
        assert!((learner.counts[0] - 4.0).abs() < 1e-9);
    }
}
