//! What systemd is told: ready, stopping, and that the server is alive.

use super::app::{App, Phase};
use super::queue::End;
use sd_notify::NotifyState;
use std::sync::Arc;
use std::time::Duration;

/// Signs of life within the time that systemd waits for one.
const SIGNS: u32 = 3;

/// Progress of the engine's thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Progress {
    /// Requests that hold a sequence.
    running: u64,
    /// Rounds of its loop.
    rounds: u64,
}

impl Progress {
    fn of(app: &App) -> Self {
        Self {
            running: app.stats.counts().running,
            rounds: app.stats.rounds(),
        }
    }

    /// Whether the engine has nothing to do, or did something since `before`.
    fn is_alive(self, before: Option<Self>) -> bool {
        self.running == 0 || before.is_none_or(|before| before.rounds != self.rounds)
    }
}

/// Tells the service manager something, where there is one.
pub fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("systemd could not be told {states:?}: {error}");
    }
}

/// How often it is looked whether the session has ended of itself.
const LOOK: Duration = Duration::from_millis(200);

/// Ends the server when its session has ended of itself: no request could succeed any more.
pub(super) async fn end_when_halted(app: Arc<App>) {
    let mut times = tokio::time::interval(LOOK);
    loop {
        times.tick().await;
        if let Phase::Ready(ready) = app.phase()
            && let Some(cause) = ready.counters.halted()
        {
            tracing::error!("the server ends: {cause}");
            app.queue.close(End::Now);
            return;
        }
    }
}

/// Gives signs of life as long as this runtime turns and the engine gets on, where systemd wants them.
pub(super) async fn keep(app: Arc<App>) {
    let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()) else {
        return;
    };
    let mut times = tokio::time::interval((limit / SIGNS).max(Duration::from_millis(1)));
    let mut before = None;
    loop {
        times.tick().await;
        let now = Progress::of(&app);
        if now.is_alive(before) {
            tell(&[NotifyState::Watchdog]);
        }
        before = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;

    #[test]
    fn an_engine_that_stands_still_is_not_alive() {
        let at = |running, rounds| Progress { running, rounds };
        assert!(at(1, 7).is_alive(None), "the first look");
        assert!(at(1, 8).is_alive(Some(at(1, 7))));
        assert!(!at(1, 8).is_alive(Some(at(1, 8))));
        assert!(!at(1, 8).is_alive(Some(at(0, 8))));
        assert!(at(0, 8).is_alive(Some(at(1, 8))), "idle");
    }
}
