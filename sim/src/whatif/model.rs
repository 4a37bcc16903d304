//! Models for `whatif`: sizes of what a token touches.

use super::hardware::{DescriptionError, within};
use hotpin_controllers::ModelShape;
use serde::Deserialize;

/// Operations for one weight and one row: a multiplication and an addition.
const OPERATIONS_A_WEIGHT: f64 = 2.0;

/// Tokens that a layer with a sliding window looks back over.
const WINDOW_TOKENS: f64 = 128.0;

/// A model whose layers are all alike.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSizes {
    /// Name in reports.
    pub name: String,
    /// MoE layers.
    pub layers: u32,
    /// Experts of each.
    pub experts: u32,
    /// Experts that a token is routed to.
    pub top_k: u32,
    /// Bytes of one expert.
    pub expert_bytes: f64,
    /// Bytes of all other weights of one layer.
    pub dense_layer_bytes: f64,
    /// Bytes of the weights outside the layers.
    pub other_bytes: f64,
    /// The part of them that one token reads.
    pub other_read_bytes: f64,
    /// KV of one token in one layer, bytes.
    pub kv_bytes_per_token_layer: f64,
    /// Share of layers that look back over a short window only.
    pub sliding_share: f64,
    /// Bits of one expert weight, for the count of operations.
    #[serde(default = "four_and_a_quarter")]
    pub weight_bits: f64,
    /// The same of all other weights.
    #[serde(default = "sixteen")]
    pub dense_bits: f64,
}

fn four_and_a_quarter() -> f64 {
    4.25
}

fn sixteen() -> f64 {
    16.0
}

/// Models that come with the program: name and text.
pub const PRESETS: [(&str, &str); 4] = [
    ("gpt-oss-20b", include_str!("../../models/gpt-oss-20b.toml")),
    (
        "gpt-oss-120b",
        include_str!("../../models/gpt-oss-120b.toml"),
    ),
    (
        "qwen3-30b-a3b",
        include_str!("../../models/qwen3-30b-a3b.toml"),
    ),
    (
        "qwen3-235b-a22b",
        include_str!("../../models/qwen3-235b-a22b.toml"),
    ),
];

impl ModelSizes {
    /// Reads a model's description.
    ///
    /// # Errors
    /// When it is no TOML, has unknown or missing keys, or a value is out of range.
    pub fn parse(text: &str) -> Result<Self, DescriptionError> {
        let model: Self = toml::from_str(text).map_err(Box::new)?;
        within("expert_bytes", model.expert_bytes, 1.0, 1e12)?;
        within("dense_layer_bytes", model.dense_layer_bytes, 0.0, 1e12)?;
        within("other_bytes", model.other_bytes, 0.0, 1e12)?;
        within(
            "other_read_bytes",
            model.other_read_bytes,
            0.0,
            model.other_bytes,
        )?;
        within(
            "kv_bytes_per_token_layer",
            model.kv_bytes_per_token_layer,
            0.0,
            1e9,
        )?;
        within("sliding_share", model.sliding_share, 0.0, 1.0)?;
        within("weight_bits", model.weight_bits, 1.0, 64.0)?;
        within("dense_bits", model.dense_bits, 1.0, 64.0)?;
        within("layers", f64::from(model.layers), 1.0, 4096.0)?;
        model.shape()?;
        Ok(model)
    }

    /// A preset by name.
    ///
    /// # Errors
    /// When there is none.
    pub fn preset(name: &str) -> Result<Self, DescriptionError> {
        let found = PRESETS.into_iter().find(|preset| preset.0 == name);
        let (_, text) = found.ok_or_else(|| DescriptionError::Unknown {
            kind: "model",
            given: name.to_owned(),
            known: PRESETS.map(|preset| preset.0).join(", "),
        })?;
        Self::parse(text)
    }

    /// The shape that the controllers know.
    ///
    /// # Errors
    /// When a layer has no experts or fewer than it routes to, or there are too many.
    pub fn shape(&self) -> Result<ModelShape, DescriptionError> {
        let bytes = crate::plant::to_bytes(self.expert_bytes);
        Ok(ModelShape::uniform(
            self.layers as usize,
            self.experts,
            bytes,
            self.top_k,
        )?)
    }

    /// Bytes of one layer's experts.
    #[must_use]
    pub fn layer_experts_bytes(&self) -> f64 {
        f64::from(self.experts) * self.expert_bytes
    }

    /// Bytes of all experts.
    #[must_use]
    pub fn experts_bytes(&self) -> f64 {
        f64::from(self.layers) * self.layer_experts_bytes()
    }

    /// Bytes of everything else.
    #[must_use]
    pub fn dense_bytes(&self) -> f64 {
        f64::from(self.layers) * self.dense_layer_bytes + self.other_bytes
    }

    /// Bytes of KV that one layer keeps for `sequences` of `context` tokens.
    #[must_use]
    pub fn kv_layer_bytes(&self, sequences: u32, context: u32) -> f64 {
        let context = f64::from(context);
        let short = context.min(WINDOW_TOKENS);
        let looked_at = (1.0 - self.sliding_share) * context + self.sliding_share * short;
        f64::from(sequences) * looked_at * self.kv_bytes_per_token_layer
    }

    /// Operations of `rows` rows, each through one expert.
    #[must_use]
    pub fn expert_operations(&self, rows: f64) -> f64 {
        self.expert_bytes * 8.0 / self.weight_bits * OPERATIONS_A_WEIGHT * rows
    }

    /// Operations of `rows` rows through other weights of `bytes`.
    #[must_use]
    pub fn dense_operations(&self, bytes: f64, rows: f64) -> f64 {
        bytes * 8.0 / self.dense_bits * OPERATIONS_A_WEIGHT * rows
    }

    /// The same model with expert sizes scaled so that the whole has `total_bytes`.
    #[must_use]
    pub fn scaled_to(mut self, total_bytes: f64) -> Self {
        let scale = (total_bytes - self.dense_bytes()) / self.experts_bytes();
        if scale > 0.0 {
            self.expert_bytes *= scale;
            self.weight_bits *= scale;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_published_sizes() {
        // Sizes of the published GGUF files, GB.
        let cases = [
            ("gpt-oss-20b", 12.1),
            ("gpt-oss-120b", 63.4),
            ("qwen3-30b-a3b", 21.7),
            ("qwen3-235b-a22b", 142.0),
        ];
        for (name, published_gb) in cases {
            let model = ModelSizes::preset(name).unwrap();
            assert_eq!(model.name, name);
            let gb = (model.experts_bytes() + model.dense_bytes()) / 1e9;
            assert!((gb / published_gb - 1.0).abs() < 0.03, "{name}: {gb:.1}");
        }
        assert!(ModelSizes::preset("gpt-2").is_err());
    }

    #[test]
    fn windows_bound_the_kv() {
        let model = ModelSizes::preset("gpt-oss-20b").unwrap();
        assert_eq!(model.kv_layer_bytes(1, 100), 100.0 * 2048.0);
        assert_eq!(model.kv_layer_bytes(2, 8192), 2.0 * 2048.0 * 4160.0);
    }
}
