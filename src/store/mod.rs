//! Where expert bytes live and how they get there.
//!
//! A store owns every memory call that moves, locks or drops expert pages, and the books that say
//! which expert is where. It decides nothing about what deserves memory: capacity and scores are
//! given to it by the governor, routed experts by the engine.

mod auto;
mod boundary;
mod coming;
mod dense;
mod direct;
mod layout;
mod mapped;
mod pages;
pub mod probe;
pub mod program;
mod ranks;
pub mod residency;
mod slice;
mod unchanged;

pub use auto::Speeds;
pub use dense::DenseLock;
pub use direct::{DirectOptions, DirectStore, DiskTrial, Fault, try_disk};
pub use layout::{Layout, LayoutError};
pub use mapped::{MappedStore, TransitKeeper};
pub use slice::SliceAt;

use hotpin_controllers::{ExpertId, Held, Residence};

/// Which store a session uses.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Default,
    serde::Serialize,
    serde::Deserialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    /// The best one for this machine.
    #[default]
    Auto,
    /// The loader's file mapping, with mlock.
    Mapped,
    /// An arena of its own, read with O_DIRECT through io_uring.
    Direct,
}

impl StoreKind {
    /// The name on the command line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Mapped => "mapped",
            Self::Direct => "direct",
        }
    }
}

/// Something that a store has to do without here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limitation {
    /// The dense weights are not locked.
    DenseUnlocked,
    /// The program itself may be reclaimed.
    ProgramUnlocked,
    /// Store mapped was taken where direct would be the better one.
    MappedInstead,
    /// Experts come through the page cache.
    NoDirectIo,
    /// Reading and computing do not overlap.
    NoUring,
}

impl Limitation {
    /// Every limitation.
    pub const ALL: [Self; 5] = [
        Self::DenseUnlocked,
        Self::ProgramUnlocked,
        Self::MappedInstead,
        Self::NoDirectIo,
        Self::NoUring,
    ];

    /// The name in metrics and `/api/state`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DenseUnlocked => "dense_unlocked",
            Self::ProgramUnlocked => "program_unlocked",
            Self::MappedInstead => "mapped_instead",
            Self::NoDirectIo => "no_direct_io",
            Self::NoUring => "no_io_uring",
        }
    }
}

/// A limitation, and what the user should know about it.
pub type Limited = (Limitation, String);

/// What one fetch found and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Routed experts that were resident, by the books.
    pub hits: u32,
    /// Those of them that were locked.
    pub pinned_hits: u32,
    /// Routed experts that were not resident.
    pub misses: u32,
    /// Bytes that reads were started for.
    pub bytes: u64,
}

/// Why a store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A router named an expert that the model does not have.
    #[error("the router of MoE layer {layer} named expert {expert}, and there are {experts}")]
    NoSuchExpert {
        /// MoE layer.
        layer: usize,
        /// Index that the router gave.
        expert: i32,
        /// Experts in the layer.
        experts: u32,
    },
    /// A lock call failed; the range was unlocked again and the books are exact.
    #[error("locking {bytes} bytes failed: {errno} ({advice})")]
    Lock {
        /// Bytes that were to be locked.
        bytes: u64,
        /// The system's answer.
        errno: nix::errno::Errno,
        /// What to do about it.
        advice: &'static str,
    },
    /// A read could not be started.
    #[error("reading ahead {bytes} bytes of expert weights failed: {errno}")]
    Read {
        /// Bytes asked for.
        bytes: usize,
        /// The system's answer.
        errno: nix::errno::Errno,
    },
    /// The store could not be set up.
    #[error("the direct store could not be set up: {cause}")]
    Open {
        /// In words for the user.
        cause: String,
    },
    /// An expert's bytes could not be had.
    #[error("{cause}")]
    Load {
        /// In words for the user.
        cause: String,
    },
}

impl StoreError {
    /// The errno of a failed system call.
    #[must_use]
    pub fn errno(&self) -> Option<nix::errno::Errno> {
        match self {
            Self::Lock { errno, .. } | Self::Read { errno, .. } => Some(*errno),
            Self::NoSuchExpert { .. } | Self::Open { .. } | Self::Load { .. } => None,
        }
    }
}

/// Asked now and then while something is read: true when whoever wants it can wait no longer.
pub type LeaveOff<'a> = &'a mut dyn FnMut() -> bool;

/// What came of reading an expert into transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warmed {
    /// It was there, or is now, or cannot be read at this moment.
    Done,
    /// Its reads were left off, and go on.
    UnderWay,
    /// There is room for it, but no memory may be taken before the next look at what is left.
    NotYet,
    /// There is no room for it.
    NoRoom,
}

/// A place where experts live. `fetch`, `is_complete`, `release` and `rest` are called by the engine's thread
/// only, everything else by the governor's. The governor never waits for the engine; the engine may wait
/// for an expert that the governor has begun to load.
pub trait ExpertStore: Send + Sync + std::fmt::Debug {
    /// Makes one layer's routed experts available, or starts to. `experts` are distinct.
    ///
    /// # Errors
    /// When bytes cannot be had; the decode must not go on.
    fn fetch(&self, experts: &[ExpertId]) -> Result<Fetched, StoreError>;

    /// Whether every expert is resident and the engine may use them without [`Self::fetch`], until
    /// [`Self::release`].
    fn is_complete(&self) -> bool;

    /// Ends what [`Self::is_complete`] granted.
    fn release(&self) {}

    /// The engine stops for a while: it uses no expert any longer, and what it was still reading, wrong guesses or
    /// what a decode wanted that was given up, is waited for until `leave_off` says otherwise. Before that such an
    /// expert can neither be pinned nor evicted.
    fn rest(&self, _leave_off: LeaveOff<'_>) {}

    /// Locks an expert, reading it first where it is not resident. True when it is locked now and
    /// was not before.
    ///
    /// # Errors
    /// [`StoreError::Lock`]; the expert is then unlocked, and the books say so.
    fn pin(&self, expert: ExpertId) -> Result<bool, StoreError> {
        self.pin_unless(expert, &mut || false)
    }

    /// The same, and false as soon as `leave_off` says so while the expert is read. Its reads go on then, and
    /// whoever asks again finds as much of it as there is.
    ///
    /// # Errors
    /// As for [`Self::pin`].
    fn pin_unless(&self, expert: ExpertId, leave_off: LeaveOff<'_>) -> Result<bool, StoreError>;

    /// Unlocks an expert; it stays resident until evicted. True when it was locked.
    fn unpin(&self, expert: ExpertId) -> bool;

    /// Clears out what loading left in memory, before the first pins, unless everything is about to
    /// be pinned. Loading reads in large folios that straddle experts: such pages can neither be
    /// dropped nor counted with one expert, so nothing of them is kept.
    fn clear_loaded(&self, planned: &[ExpertId]);

    /// Makes some memory ready that will be used soon, so that the engine does not wait for it. False when there
    /// was nothing to do.
    fn prepare(&self) -> bool {
        false
    }

    /// Reads an expert into transit if there is room, behind what the engine reads. For the start, best first;
    /// does nothing where the kernel keeps transit. True while there was room, and memory for it.
    fn warm(&self, expert: ExpertId) -> bool {
        self.warm_unless(expert, &mut || false) == Warmed::Done
    }

    /// The same, and back as soon as `leave_off` says so while the expert is read.
    fn warm_unless(&self, expert: ExpertId, leave_off: LeaveOff<'_>) -> Warmed;

    /// Lets so many bytes of memory be taken within the budget that are not held yet, until this is said again;
    /// before, there is no bound. Where transit is page cache, which the kernel takes back by itself, nothing has to
    /// be bounded between the pins.
    fn allow_fresh(&self, _bytes: u64) {}

    /// Sets the byte budget for pinned + transit.
    fn set_capacity(&self, bytes: u64);

    /// Publishes what transit is ranked by, one an expert (see `Policy::ranks`).
    fn publish_ranks(&self, ranks: &[f32]);

    /// Evicts transit above the budget. For when the engine is idle; it does so itself otherwise.
    fn trim(&self);

    /// Compares the books on transit with the kernel and corrects them: pages may have been reclaimed or swapped out.
    /// Returns the bytes found gone; `None` when residency cannot be known.
    fn audit(&self) -> Option<u64>;

    /// Forgets the lock shortfall: what is pinned from now on counts for the next observation. Takes in what has
    /// ended of reads that were left off.
    fn start_tick(&self);

    /// What the books say is held.
    fn held(&self) -> Held;

    /// Bytes of transit that are the process's own memory: the system does not count them as
    /// available, though they can be given back at once as page cache can.
    fn private_transit_bytes(&self) -> u64 {
        0
    }

    /// Time that the engine has waited for bytes of routed experts since the store was made, ns;
    /// `None` where waits are page faults, which the store does not see.
    fn waited_ns(&self) -> Option<u64> {
        None
    }

    /// Bytes a second that this store reads experts with when nothing else is done, measured now, which
    /// takes some tenths of a second; `None` when it cannot be known.
    fn read_bandwidth(&self) -> Option<f64> {
        None
    }

    /// Whether the model's files are still what they were when their headers were read.
    ///
    /// # Errors
    /// In words for the user; what was computed since is not to be used.
    fn check_unchanged(&self) -> Result<(), String>;

    /// Bytes that are locked by the books, dense weights included, in whole pages and each page once: what
    /// the kernel counts as `VmLck`, but for the [program's own](program::locked_bytes).
    fn locked_bytes(&self) -> u64;

    /// Residence of every expert, by the books.
    fn residence_into(&self, out: &mut [Residence]);

    /// Reads what of the dense weights is not there, so that locking them takes no time; false as soon as `leave_off`
    /// says so.
    fn warm_dense(&self, _leave_off: LeaveOff<'_>) -> bool {
        true
    }

    /// Locks or unlocks the dense weights. Only while no expert is pinned, since they share pages.
    fn set_dense_locked(&self, lock: bool) -> DenseLock;

    /// Unlocks everything, dense weights included, for good: nothing is pinned after it.
    fn unlock_all(&self);
}
