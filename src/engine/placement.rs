//! Where a model's weights are loaded: on the host, from where experts are used by the page, or in the
//! memory of a graphics device.

use crate::model::{ModelMap, NameClass, classify_name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// How many of a model's blocks, counted from the last one, have their dense weights on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum GpuLayers {
    /// None: everything is computed on the CPU, and no device is used at all.
    #[default]
    None,
    /// The last few; the weights behind the last block count as one more.
    Last(u32),
    /// All of them.
    All,
}

/// A number of layers that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is neither a number of layers nor `all`")]
pub struct NoSuchLayers(String);

impl FromStr for GpuLayers {
    type Err = NoSuchLayers;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self::All),
            "0" => Ok(Self::None),
            _ => text
                .parse()
                .map(Self::Last)
                .map_err(|_| NoSuchLayers(text.to_owned())),
        }
    }
}

impl TryFrom<String> for GpuLayers {
    type Error = NoSuchLayers;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<GpuLayers> for String {
    fn from(layers: GpuLayers) -> Self {
        layers.to_string()
    }
}

impl fmt::Display for GpuLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("0"),
            Self::Last(count) => write!(f, "{count}"),
            Self::All => f.write_str("all"),
        }
    }
}

/// What of a model is where. By default everything is on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    layers: GpuLayers,
    /// Blocks of the file, those included that decoding never runs.
    blocks: u32,
    /// Blocks whose experts are on the device as well.
    experts: BTreeSet<u32>,
}

impl Placement {
    /// Dense weights of some blocks of a model on the device, all routed experts on the host.
    #[must_use]
    pub fn new(map: &ModelMap, layers: GpuLayers) -> Self {
        let block = |name: &str| match classify_name(name) {
            NameClass::Expert { block, .. } | NameClass::Block(block) => Some(block),
            NameClass::OldExpert | NameClass::Outside => None,
        };
        let last = map
            .tensors()
            .iter()
            .filter_map(|t| block(&t.info.name))
            .max();
        Self {
            layers,
            blocks: last.map_or(0, |last| last + 1),
            experts: BTreeSet::new(),
        }
    }

    /// The same with the routed experts of some blocks on the device, those left out whose dense
    /// weights are not there.
    #[must_use]
    pub fn with_experts(mut self, blocks: impl IntoIterator<Item = u32>) -> Self {
        let blocks = blocks.into_iter().filter(|&b| self.holds_block(b));
        self.experts = blocks.collect();
        self
    }

    /// Whether a device is used.
    #[must_use]
    pub fn uses_device(&self) -> bool {
        self.layers != GpuLayers::None
    }

    /// The layers asked for.
    #[must_use]
    pub const fn layers(&self) -> GpuLayers {
        self.layers
    }

    /// Blocks whose experts are on the device.
    #[must_use]
    pub const fn experts(&self) -> &BTreeSet<u32> {
        &self.experts
    }

    /// Whether the device holds the dense weights of a block.
    #[must_use]
    pub fn holds_block(&self, block: u32) -> bool {
        match self.layers {
            GpuLayers::None => false,
            GpuLayers::All => true,
            // llama.cpp counts what follows the last block as one more layer.
            GpuLayers::Last(count) => block >= (self.blocks + 1).saturating_sub(count),
        }
    }

    /// Whether a tensor is used from the model file's mapping.
    #[must_use]
    pub fn on_host(&self, name: &str) -> bool {
        if !self.uses_device() {
            return true;
        }
        match classify_name(name) {
            NameClass::Expert { block, .. } => !self.experts.contains(&block),
            NameClass::Block(block) => !self.holds_block(block),
            // llama.cpp leaves what turns tokens into vectors on the CPU; the rest follows the blocks.
            NameClass::OldExpert | NameClass::Outside => {
                name.contains("token_embd") || !self.holds_block(self.blocks)
            }
        }
    }

    /// llama.cpp's number of layers.
    pub(super) fn count(&self) -> i32 {
        match self.layers {
            GpuLayers::None => 0,
            GpuLayers::Last(count) => i32::try_from(count).unwrap_or(i32::MAX),
            GpuLayers::All => i32::MAX,
        }
    }

    /// Patterns of tensor names, in order: whether what matches is on the device. What matches none
    /// follows its block.
    pub(super) fn patterns(&self) -> Vec<(String, bool)> {
        if !self.uses_device() {
            return Vec::new();
        }
        let mut patterns = Vec::new();
        if !self.experts.is_empty() {
            let blocks: Vec<String> = self.experts.iter().map(u32::to_string).collect();
            patterns.push((
                format!(r"^blk\.({})\.ffn_(?!norm_).*_exps", blocks.join("|")),
                true,
            ));
        }
        patterns.push((r"\.ffn_(?!norm_).*_exps".to_owned(), false));
        patterns
    }
}

#[cfg(test)]
mod tests {
    use super::{GpuLayers, Placement};

    fn of(layers: GpuLayers) -> Placement {
        Placement {
            layers,
            blocks: 4,
            ..Placement::default()
        }
    }

    #[test]
    fn experts_stay_on_the_host_unless_their_block_is_named() {
        let all = of(GpuLayers::All);
        assert!(all.on_host("blk.1.ffn_up_exps.weight"));
        assert!(!all.on_host("blk.1.attn_q.weight"));
        assert!(!all.on_host("blk.1.ffn_norm_exps.weight"));
        assert!(all.on_host("token_embd.weight") && !all.on_host("output.weight"));
        let named = all.with_experts([1]);
        assert!(!named.on_host("blk.1.ffn_up_exps.weight"));
        assert!(named.on_host("blk.2.ffn_up_exps.weight"));
    }

    #[test]
    fn the_last_layers_are_counted_with_the_output_as_one() {
        let last = of(GpuLayers::Last(2));
        assert!(last.holds_block(3) && !last.holds_block(2));
        assert!(!last.on_host("output.weight"));
        assert!(
            of(GpuLayers::Last(2))
                .with_experts([2, 3])
                .experts()
                .iter()
                .eq(&[3])
        );
        assert!(of(GpuLayers::None).on_host("blk.3.attn_q.weight"));
        assert!(of(GpuLayers::Last(99)).holds_block(0));
    }

    #[test]
    fn layers_are_a_number_or_all() {
        assert_eq!("all".parse(), Ok(GpuLayers::All));
        assert_eq!("0".parse(), Ok(GpuLayers::None));
        assert_eq!("17".parse(), Ok(GpuLayers::Last(17)));
        assert!("-1".parse::<GpuLayers>().is_err() && "".parse::<GpuLayers>().is_err());
    }
}
