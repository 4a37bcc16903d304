//! The ggml tensor types: how many elements a block holds, and how many bytes it takes.

/// One ggml tensor type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType {
    /// ggml's number for it, as stored in GGUF.
    pub id: u32,
    /// ggml's name for it.
    pub name: &'static str,
    /// Elements in a block; a row is a whole number of blocks.
    pub block_elements: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
}

/// Why a type number has no [`GgmlType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSuchType {
    /// ggml once had it and gave it up.
    Removed(&'static str),
    /// Beyond the newest type known here.
    Unknown,
}

const fn ty(id: u32, name: &'static str, block_elements: u64, block_bytes: u64) -> GgmlType {
    GgmlType {
        id,
        name,
        block_elements,
        block_bytes,
    }
}

/// All types of the pinned ggml, by number. Sizes are `sizeof(block_*)` of ggml-common.h.
pub const GGML_TYPES: [GgmlType; 36] = [
    ty(0, "f32", 1, 4),
    ty(1, "f16", 1, 2),
    ty(2, "q4_0", 32, 18),
    ty(3, "q4_1", 32, 20),
    ty(6, "q5_0", 32, 22),
    ty(7, "q5_1", 32, 24),
    ty(8, "q8_0", 32, 34),
    ty(9, "q8_1", 32, 36),
    ty(10, "q2_K", 256, 84),
    ty(11, "q3_K", 256, 110),
    ty(12, "q4_K", 256, 144),
    ty(13, "q5_K", 256, 176),
    ty(14, "q6_K", 256, 210),
    ty(15, "q8_K", 256, 292),
    ty(16, "iq2_xxs", 256, 66),
    ty(17, "iq2_xs", 256, 74),
    ty(18, "iq3_xxs", 256, 98),
    ty(19, "iq1_s", 256, 50),
    ty(20, "iq4_nl", 32, 18),
    ty(21, "iq3_s", 256, 110),
    ty(22, "iq2_s", 256, 82),
    ty(23, "iq4_xs", 256, 136),
    ty(24, "i8", 1, 1),
    ty(25, "i16", 1, 2),
    ty(26, "i32", 1, 4),
    ty(27, "i64", 1, 8),
    ty(28, "f64", 1, 8),
    ty(29, "iq1_m", 256, 56),
    ty(30, "bf16", 1, 2),
    ty(34, "tq1_0", 256, 54),
    ty(35, "tq2_0", 256, 66),
    ty(39, "mxfp4", 32, 17),
    ty(40, "nvfp4", 64, 36),
    ty(41, "q1_0", 128, 18),
    ty(42, "q2_0", 64, 18),
    ty(43, "f8_e4m3", 1, 1),
];

/// The type with ggml's number `id`.
///
/// # Errors
/// When ggml has removed that type, or the pinned ggml never had it.
pub fn ggml_type(id: u32) -> Result<&'static GgmlType, NoSuchType> {
    match GGML_TYPES.binary_search_by_key(&id, |ty| ty.id) {
        Ok(index) => Ok(&GGML_TYPES[index]),
        Err(_) => Err(match id {
            4 => NoSuchType::Removed("q4_2"),
            5 => NoSuchType::Removed("q4_3"),
            31 => NoSuchType::Removed("q4_0_4_4"),
            32 => NoSuchType::Removed("q4_0_4_8"),
            33 => NoSuchType::Removed("q4_0_8_8"),
            36 => NoSuchType::Removed("iq4_nl_4_4"),
            37 => NoSuchType::Removed("iq4_nl_4_8"),
            38 => NoSuchType::Removed("iq4_nl_8_8"),
            _ => NoSuchType::Unknown,
        }),
    }
}

impl GgmlType {
    /// Bytes of a tensor of this type, or `None` when a row is not a whole number of blocks or the
    /// product overflows.
    #[must_use]
    pub fn tensor_bytes(&self, dims: &[u64]) -> Option<u64> {
        let row = dims.first().copied().unwrap_or(1);
        if !row.is_multiple_of(self.block_elements) {
            return None;
        }
        let blocks = dims
            .iter()
            .skip(1)
            .try_fold(row / self.block_elements, |n, &d| n.checked_mul(d))?;
        blocks.checked_mul(self.block_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_sorted_so_that_binary_search_holds() {
        assert!(GGML_TYPES.windows(2).all(|pair| pair[0].id < pair[1].id));
    }

    #[test]
    fn every_number_is_known_removed_or_unknown() {
        for id in 0..44 {
            match ggml_type(id) {
                Ok(found) => assert_eq!(found.id, id),
                Err(why) => assert!(matches!(why, NoSuchType::Removed(_)), "{id}: {why:?}"),
            }
        }
        assert_eq!(ggml_type(44), Err(NoSuchType::Unknown));
        assert_eq!(ggml_type(u32::MAX), Err(NoSuchType::Unknown));
    }

    #[test]
    fn tensor_bytes_counts_blocks_and_never_overflows() {
        let q8 = ggml_type(8).unwrap();
        assert_eq!(q8.tensor_bytes(&[64, 3, 2]), Some(2 * 34 * 6));
        assert_eq!(q8.tensor_bytes(&[33, 3]), None);
        assert_eq!(q8.tensor_bytes(&[32, u64::MAX]), None);
        assert_eq!(q8.tensor_bytes(&[1 << 40, 1 << 40]), None);
        assert_eq!(ggml_type(0).unwrap().tensor_bytes(&[]), Some(4));
    }
}
