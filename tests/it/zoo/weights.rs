//! Random weights: the same for the same name, of any type that ggml writes.

use crate::gguf_writer::Ty;
use hotpin::model::types::GGML_TYPES;
use llama_cpp_sys_4 as sys;
use std::rc::Rc;

/// The type that ggml calls `name`.
pub fn type_named(name: &str) -> Ty {
    let ty = GGML_TYPES
        .iter()
        .find(|ty| ty.name == name)
        .unwrap_or_else(|| panic!("no type is called {name}"));
    (ty.id, ty.block_elements, ty.block_bytes)
}

/// A sequence of numbers that its seed determines (splitmix64).
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each name.
    pub fn of(name: &str) -> Self {
        // FNV-1a.
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        }))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        #[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
        let value = (self.next() >> 40) as f32 / 8_388_608.0;
        value - 1.0
    }

    pub fn below(&mut self, end: u32) -> u32 {
        u32::try_from(self.next() % u64::from(end)).expect("below a u32")
    }
}

/// Rows that are converted at most: some types take long to write. Larger tensors repeat these, in
/// another order each time, so that no two experts are alike.
const CONVERTED_ROWS: usize = 128;

/// Weights of a tensor: norms around 1, decays below 0, the rest around 0 so that a product keeps the
/// scale of its input.
fn values(name: &str, dims: &[u64], count: usize) -> Vec<f32> {
    let mut random = Random::of(name);
    let base = name.rsplit_once('.').map_or(name, |(base, _)| base);
    #[expect(clippy::cast_precision_loss, reason = "toy sizes")]
    let spread = (3.0 / dims[0] as f32).sqrt();
    let is_norm = base.contains("norm") && name.ends_with(".weight");
    let is_router = base.ends_with("ffn_gate_inp");
    let value = |unit: f32| match () {
        () if name.contains(".ssm_a") && !name.contains("alpha") => -1.0 + 0.5 * unit,
        () if is_norm || name.ends_with(".scale") => 1.0 + 0.1 * unit,
        // Far enough apart that every token has experts of its own.
        () if is_router => 2.0 * spread * unit,
        () if dims.len() == 1 || name.ends_with(".bias") => 0.1 * unit,
        () => spread * unit,
    };
    (0..count).map(|_| value(random.unit())).collect()
}

/// The same values as a tensor's bytes.
pub fn bytes(name: &str, dims: &[u64], ty: Ty) -> Rc<[u8]> {
    let row = usize::try_from(dims[0]).expect("small");
    let all_rows = usize::try_from(dims[1..].iter().product::<u64>()).expect("small");
    let rows = all_rows.min(CONVERTED_ROWS);
    let values = values(name, dims, rows * row);
    let (id, block_elements, block_bytes) = ty;
    assert!(
        dims[0].is_multiple_of(block_elements),
        "{name}: rows of {row} are not whole blocks"
    );
    let row_bytes = usize::try_from(dims[0] / block_elements * block_bytes).expect("small");
    let mut out = vec![0_u8; rows * row_bytes];
    // Equal importance of all columns, for the types that want to be told.
    let importance = vec![1.0_f32; row];
    // SAFETY: `values` holds rows of `row` floats, `importance` one, and `out` has room for as many
    // rows of the type.
    let written = unsafe {
        sys::ggml_quantize_chunk(
            id,
            values.as_ptr(),
            out.as_mut_ptr().cast(),
            0,
            i64::try_from(rows).expect("small"),
            i64::try_from(row).expect("small"),
            importance.as_ptr(),
        )
    };
    assert_eq!(written, out.len(), "{name}");
    let pick = |at: usize| (at + at / rows * (at / rows + 7)) % rows;
    let bytes = (0..all_rows).flat_map(|at| &out[pick(at) * row_bytes..][..row_bytes]);
    bytes.copied().collect()
}

/// Random indices below `end`.
pub fn indices(name: &str, dims: &[u64], end: u32) -> Rc<[u8]> {
    let count = dims.iter().product::<u64>();
    let mut random = Random::of(name);
    (0..count)
        .flat_map(|_| random.below(end).to_le_bytes())
        .collect()
}
