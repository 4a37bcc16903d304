//! The real program, as tests start it.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Compute threads of the tests: one, which no busy machine keeps waiting at a barrier.
pub const THREADS: &str = "1";

/// The program with these arguments, cut off from this process's own settings.
pub fn program<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hotpin"));
    command.args(args).stdin(Stdio::null());
    clean(&mut command);
    command
}

/// Removes the settings that the program would take from the environment.
pub fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HOTPIN_") {
            command.env_remove(name);
        }
    }
    // No settings file of whoever runs the tests.
    command.env("HOTPIN_CONFIG", "/dev/null");
}

/// A model that `make test` makes, or the one that the variable names.
pub fn model_file(variable: &str, name: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(
        || {
            let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
            let cache = std::env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or(home);
            cache.unwrap_or_default().join("hotpin/models").join(name)
        },
        PathBuf::from,
    )
}
