//! The model's files as the direct store reads them, and what alignment they want.

use crate::model::Shard;
use crate::store::unchanged::Stamp;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

/// Alignment where the kernel does not tell one: larger than any logical block in use.
const UNKNOWN_ALIGN_BYTES: usize = 4096;
/// Larger alignments than this are taken for nonsense.
const MOST_ALIGN_BYTES: usize = 1 << 16;

/// One open shard.
#[derive(Debug)]
pub(super) struct ModelFile {
    pub(super) file: File,
    /// The same file through the page cache: the second path of `--verify`, and what answers when
    /// direct reads are refused.
    pub(super) cached: File,
}

/// All shards, with the alignment that suits them all.
#[derive(Debug)]
pub(super) struct ModelFiles {
    pub(super) shards: Vec<ModelFile>,
    /// Alignment of offsets, lengths and addresses; 1 when reads go through the page cache.
    pub(super) align: usize,
    /// Why reads go through the page cache, when they do.
    pub(super) not_direct: Option<String>,
}

impl ModelFiles {
    /// Opens every shard for direct reads, or all of them for cached reads where one refuses.
    ///
    /// # Errors
    /// When a shard cannot be opened at all.
    pub(super) fn open(shards: &[Shard], direct: bool) -> io::Result<Self> {
        let refused = if direct {
            match Self::open_with(shards, libc::O_DIRECT) {
                Ok(shards) => {
                    let align = shards.iter().map(|s| alignment(&s.file)).max().unwrap_or(1);
                    let files = Self {
                        shards,
                        align,
                        not_direct: None,
                    };
                    match files.try_read() {
                        Ok(()) => return Ok(files),
                        Err(error) => format!("a direct read failed: {error}"),
                    }
                }
                Err(error) => format!("opening with O_DIRECT failed: {error}"),
            }
        } else {
            "direct reads were not asked for".to_owned()
        };
        Ok(Self {
            shards: Self::open_with(shards, 0)?,
            align: 1,
            not_direct: Some(refused),
        })
    }

    fn open_with(shards: &[Shard], flags: libc::c_int) -> io::Result<Vec<ModelFile>> {
        let open = |shard: &Shard| {
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(flags)
                .open(&shard.path)?;
            let cached = File::open(&shard.path)?;
            Stamp::new(shard, &file)?;
            Ok(ModelFile { file, cached })
        };
        shards.iter().map(open).collect()
    }

    /// One read of the first block of each shard: some file systems accept the flag and refuse the
    /// read.
    fn try_read(&self) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let mut buffer = vec![0_u8; 2 * self.align];
        let start = buffer.as_ptr().align_offset(self.align);
        let block = &mut buffer[start..start + self.align];
        self.shards
            .iter()
            .try_for_each(|s| s.file.read_at(block, 0).map(drop))
    }
}

/// The alignment that direct reads of a file need.
fn alignment(file: &File) -> usize {
    // SAFETY: all of the struct's fields are numbers, for which zero is valid.
    let mut stx: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is an empty NUL-terminated string, and `stx` is a
    // struct of the size that the call fills.
    let code = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stx,
        )
    };
    let told = stx.stx_dio_mem_align.max(stx.stx_dio_offset_align) as usize;
    let known = code == 0
        && stx.stx_mask & libc::STATX_DIOALIGN != 0
        && told.is_power_of_two()
        && told <= MOST_ALIGN_BYTES;
    if known { told } else { UNKNOWN_ALIGN_BYTES }
}
