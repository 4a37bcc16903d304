//! SIGHUP: the settings are read again, what can change in a running server does, and the rest is named.

use super::log::{self, note};
use super::{Invocation, InvocationError, Verb, common};
use crate::config::{Effective, Origin, literal};
use crate::governor::Monitor;
use crate::server::{App, Phase};
use hotpin_controllers::{AdaptiveConfig, PolicyKind};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Time between two looks at whether a model that is loading is there.
const LOOK: Duration = Duration::from_millis(100);

/// A server's settings as they are in force, which are those that changes are told against.
struct Reloader {
    argv: Vec<OsString>,
    settings: Vec<Effective>,
}

/// What a file says otherwise than before.
struct Change<'a> {
    key: &'a str,
    before: String,
    after: String,
    origin: &'a Origin,
}

/// Waits for SIGHUP from now on, on a thread of its own, as long as the program runs.
///
/// # Errors
/// When the signal cannot be waited for.
pub(super) fn watch(app: &Arc<App>, invocation: &Invocation) -> std::io::Result<()> {
    let mut reloader = Reloader {
        argv: invocation.argv.clone(),
        settings: invocation.effective().unwrap_or_default(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut hangup: Signal = {
        let _entered = runtime.enter();
        signal(SignalKind::hangup())?
    };
    let app = Arc::clone(app);
    std::thread::Builder::new()
        .name("hotpin-reload".into())
        .spawn(move || {
            runtime.block_on(async {
                while hangup.recv().await.is_some() {
                    while matches!(app.phase(), Phase::Loading { .. }) {
                        tokio::time::sleep(LOOK).await;
                    }
                    reloader.reload(&app);
                }
            });
        })?;
    Ok(())
}

impl Reloader {
    fn reload(&mut self, app: &App) {
        let Phase::Ready(ready) = app.phase() else {
            return;
        };
        let read = Read::new(&self.argv);
        let read = match read {
            Ok(read) => read,
            Err(error) => {
                note(&format!(
                    "hotpin: reload refused, the old settings stay: {error}"
                ));
                return;
            }
        };
        let changes = changes(&self.settings, &read.settings);
        if changes.is_empty() {
            note("hotpin: reload: nothing has changed");
            return;
        }
        let policy = ready.info.policy;
        for change in &changes {
            let Change {
                key,
                before,
                after,
                origin,
            } = change;
            note(&if is_live(key, policy) {
                format!("hotpin: reload: {key} = {after} ({origin}), was {before}")
            } else {
                format!(
                    "hotpin: reload: {key} = {after} ({origin}) takes effect at the next start; {before} stays"
                )
            });
        }
        let live: Vec<String> = changes
            .iter()
            .filter(|change| is_live(change.key, policy))
            .map(|change| change.key.to_owned())
            .collect();
        drop(changes);
        carry_out(&live, &read, ready.monitor.as_ref());
        self.take_over(&live, read.settings);
    }

    /// Remembers what is in force now. What is not stays as it was, so that the next reload names it again.
    fn take_over(&mut self, live: &[String], after: Vec<Effective>) {
        for new in after {
            if !live.contains(&new.key) {
                continue;
            }
            if let Some(old) = self.settings.iter_mut().find(|old| old.key == new.key) {
                *old = new;
            }
        }
    }
}

/// The settings as files, environment and arguments say now.
struct Read {
    settings: Vec<Effective>,
    control: AdaptiveConfig,
    log_level: String,
}

impl Read {
    fn new(argv: &[OsString]) -> anyhow::Result<Self> {
        let invocation = Invocation::read(argv.to_vec()).map_err(|error| match error {
            InvocationError::Arguments(error) => {
                let text = error.to_string();
                anyhow::anyhow!("{}", text.lines().next().unwrap_or_default())
            }
            InvocationError::Config(error) => error.into(),
        })?;
        let Verb::Serve(args) = &invocation.cli.verb else {
            anyhow::bail!("this is no server");
        };
        args.check(&invocation.config)?;
        Ok(Self {
            settings: invocation.effective()?,
            control: common::control(args.regulation(), &invocation.config)?,
            log_level: invocation.log_level().to_owned(),
        })
    }
}

fn changes<'a>(before: &[Effective], after: &'a [Effective]) -> Vec<Change<'a>> {
    after
        .iter()
        .filter_map(|new| {
            let old = before.iter().find(|old| old.key == new.key)?;
            (old.value != new.value).then(|| Change {
                key: &new.key,
                before: literal(&old.value),
                after: literal(&new.value),
                origin: &new.origin,
            })
        })
        .collect()
}

/// Whether a setting can change while the server runs.
fn is_live(key: &str, policy: PolicyKind) -> bool {
    match key.strip_prefix("laws.") {
        // Scores keep the settings that they were counted with, and the other policies choose by rules of
        // their own.
        Some(law) if law.starts_with("scores.") => false,
        Some(law) if law.starts_with("targeting.") => policy == PolicyKind::Adaptive,
        Some(_) => true,
        None => matches!(key, "control.capacity" | "control.reserve" | "log.level"),
    }
}

fn carry_out(live: &[String], read: &Read, monitor: Option<&Monitor>) {
    if live.iter().any(|key| key == "log.level") {
        log::set_level(&read.log_level);
    }
    let laws = live
        .iter()
        .any(|key| key.starts_with("laws.") || key == "control.reserve");
    let capacity = live.iter().any(|key| key == "control.capacity");
    if !laws && !capacity {
        return;
    }
    let Some(monitor) = monitor else {
        note("hotpin: reload: nothing is regulated here, so control and laws change nothing");
        return;
    };
    if let Some(why) = monitor.status().failed {
        note(&format!(
            "hotpin: reload: the control loop has ended: {why}"
        ));
    }
    if laws && let Err(error) = monitor.reconfigure(&read.control) {
        note(&format!("hotpin: reload: the laws' settings stay: {error}"));
    }
    if capacity {
        monitor.limit_capacity(read.control.capacity.limit_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::is_live;
    use hotpin_controllers::PolicyKind;

    #[test]
    fn what_can_change_in_a_running_server() {
        let adaptive = PolicyKind::Adaptive;
        for key in [
            "control.capacity",
            "control.reserve",
            "log.level",
            "laws.pressure.integral_gain_per_s",
            "laws.targeting.margin",
        ] {
            assert!(is_live(key, adaptive), "{key}");
        }
        for key in [
            "server.port",
            "engine.threads",
            "control.tick_ms",
            "log.format",
            "laws.scores.slow_weight",
        ] {
            assert!(!is_live(key, adaptive), "{key}");
        }
        assert!(!is_live("laws.targeting.margin", PolicyKind::Lru));
    }
}
