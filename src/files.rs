//! Files written whole or not at all.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Writes a file so that a reader sees the old one or all of the new one; makes its folder.
pub(crate) fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let dir = path
        .parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    // Temporary files are private by default; a report is as open as the user's umask makes it.
    let mode = std::fs::Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new()
        .permissions(mode)
        .tempfile_in(dir)?;
    file.write_all(text.as_bytes())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}
