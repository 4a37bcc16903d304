//! ggml's tensor types: row sizes, quantising and dequantising.

use llama_cpp_sys_4 as sys;

/// A ggml tensor type that this build of ggml knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorType(sys::ggml_type);

/// Why rows could not be converted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum QuantizeError {
    /// The row does not divide into the type's blocks.
    #[error("rows of {row_len} values do not divide into {type_name} blocks of {block}")]
    Row {
        /// Values in one row.
        row_len: usize,
        /// Values in one block of the type.
        block: usize,
        /// ggml's name of the type.
        type_name: String,
    },
    /// The two buffers do not hold the same number of values.
    #[error("{values} values as {type_name} are {needed} bytes, but the buffer has {found}")]
    Size {
        /// Values to convert.
        values: usize,
        /// ggml's name of the type.
        type_name: String,
        /// Bytes that the values take.
        needed: usize,
        /// Bytes of the buffer.
        found: usize,
    },
    /// ggml cannot convert this type from or to `f32` here.
    #[error("ggml cannot convert {type_name} rows {direction} 32-bit floats")]
    Unsupported {
        /// ggml's name of the type.
        type_name: String,
        /// `to` or `from`.
        direction: &'static str,
    },
}

impl TensorType {
    /// 32-bit floats.
    pub const F32: Self = Self(sys::GGML_TYPE_F32);
    /// 16-bit floats.
    pub const F16: Self = Self(sys::GGML_TYPE_F16);
    /// Blocks of 32 values, 8 bits each and one 16-bit scale.
    pub const Q8_0: Self = Self(sys::GGML_TYPE_Q8_0);
    /// Blocks of 32 values, 4 bits each and one 16-bit scale.
    pub const Q4_0: Self = Self(sys::GGML_TYPE_Q4_0);

    /// The type with ggml's number `raw`, if this ggml has it.
    #[must_use]
    pub fn from_raw(raw: sys::ggml_type) -> Option<Self> {
        let known = raw < sys::GGML_TYPE_COUNT && Self(raw).traits().type_size > 0;
        known.then_some(Self(raw))
    }

    /// ggml's number of the type.
    #[must_use]
    pub const fn raw(self) -> sys::ggml_type {
        self.0
    }

    /// ggml's name of the type, such as `q8_0`.
    #[must_use]
    pub fn name(self) -> String {
        let name = self.traits().type_name;
        if name.is_null() {
            return format!("type {}", self.0);
        }
        // SAFETY: ggml's table holds static, NUL-terminated names.
        unsafe { std::ffi::CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }

    /// Values in one block; 1 for the float types.
    #[must_use]
    pub fn block_len(self) -> usize {
        usize::try_from(self.traits().blck_size).unwrap_or(1).max(1)
    }

    /// Bytes of one row of `row_len` values.
    ///
    /// # Errors
    /// When the row does not divide into blocks.
    pub fn row_bytes(self, row_len: usize) -> Result<usize, QuantizeError> {
        let block = self.block_len();
        if !row_len.is_multiple_of(block) {
            return Err(QuantizeError::Row {
                row_len,
                block,
                type_name: self.name(),
            });
        }
        Ok(row_len / block * self.traits().type_size)
    }

    /// Whether [`dequantize`] can read rows of this type.
    #[must_use]
    pub fn reads_as_floats(self) -> bool {
        self == Self::F32 || self.traits().to_float.is_some()
    }

    fn traits(self) -> &'static sys::ggml_type_traits {
        // SAFETY: `self.0` is below GGML_TYPE_COUNT (constants, or checked by `from_raw` before any
        // use), so ggml returns an entry of its static, never changing table.
        unsafe { &*sys::ggml_get_type_traits(self.0) }
    }
}

/// Reads rows of `row_len` values out of `bytes` of the given type.
///
/// # Errors
/// When the row does not divide into blocks, the sizes disagree, or ggml cannot read the type.
pub fn dequantize(
    ty: TensorType,
    row_len: usize,
    bytes: &[u8],
    out: &mut [f32],
) -> Result<(), QuantizeError> {
    check_sizes(ty, row_len, out.len(), bytes.len())?;
    if ty == TensorType::F32 {
        for (value, raw) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_ne_bytes([raw[0], raw[1], raw[2], raw[3]]);
        }
        return Ok(());
    }
    let unsupported = || QuantizeError::Unsupported {
        type_name: ty.name(),
        direction: "to",
    };
    let to_float = ty.traits().to_float.ok_or_else(unsupported)?;
    let count = i64::try_from(out.len()).map_err(|_| unsupported())?;
    // SAFETY: `check_sizes` made sure that `bytes` holds exactly `count` values in whole blocks and
    // `out` has room for them; ggml's readers accept blocks at any 2-byte alignment that files and
    // heap buffers give, and touch nothing else.
    unsafe { to_float(bytes.as_ptr().cast(), out.as_mut_ptr(), count) };
    Ok(())
}

/// Writes rows of `row_len` values from `values` into `out` as the given type.
///
/// # Errors
/// When the row does not divide into blocks, the sizes disagree, or ggml needs an importance matrix
/// for the type.
pub fn quantize(
    ty: TensorType,
    row_len: usize,
    values: &[f32],
    out: &mut [u8],
) -> Result<(), QuantizeError> {
    check_sizes(ty, row_len, values.len(), out.len())?;
    let unsupported = || QuantizeError::Unsupported {
        type_name: ty.name(),
        direction: "from",
    };
    let writable = [
        TensorType::F32,
        TensorType::F16,
        TensorType::Q8_0,
        TensorType::Q4_0,
    ]
    .contains(&ty);
    if !writable {
        return Err(unsupported());
    }
    if values.is_empty() {
        return Ok(());
    }
    let rows = i64::try_from(values.len() / row_len).map_err(|_| unsupported())?;
    let row_len = i64::try_from(row_len).map_err(|_| unsupported())?;
    // SAFETY: `values` holds rows * row_len floats and `out` exactly the bytes of as many values
    // (`check_sizes`); start 0 is a row boundary; the four types above need no importance matrix.
    unsafe {
        sys::ggml_quantize_chunk(
            ty.raw(),
            values.as_ptr(),
            out.as_mut_ptr().cast(),
            0,
            rows,
            row_len,
            std::ptr::null(),
        );
    }
    Ok(())
}

fn check_sizes(
    ty: TensorType,
    row_len: usize,
    values: usize,
    found: usize,
) -> Result<(), QuantizeError> {
    let row_bytes = ty.row_bytes(row_len)?;
    let rows = values.checked_div(row_len).unwrap_or(0);
    let needed = rows.saturating_mul(row_bytes);
    if rows * row_len != values || needed != found {
        return Err(QuantizeError::Size {
            values,
            type_name: ty.name(),
            needed,
            found,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_within_the_types_precision() {
        let values: Vec<f32> = (0u8..64).map(|i| (f32::from(i) - 31.5) / 32.0).collect();
        for (ty, tolerance) in [
            (TensorType::F32, 0.0),
            (TensorType::F16, 1e-3),
            (TensorType::Q8_0, 0.01),
            (TensorType::Q4_0, 0.15),
        ] {
            let mut bytes = vec![0u8; ty.row_bytes(32).unwrap() * 2];
            quantize(ty, 32, &values, &mut bytes).unwrap();
            let mut back = vec![0f32; 64];
            dequantize(ty, 32, &bytes, &mut back).unwrap();
            for (a, b) in values.iter().zip(&back) {
                assert!((a - b).abs() <= tolerance, "{} {a} {b}", ty.name());
            }
        }
    }

    #[test]
    fn sizes_that_disagree_are_refused() {
        assert!(matches!(
            TensorType::Q8_0.row_bytes(33),
            Err(QuantizeError::Row { .. })
        ));
        let mut out = vec![0u8; 10];
        let refused = quantize(TensorType::Q8_0, 32, &[0.0; 32], &mut out);
        assert!(matches!(
            refused,
            Err(QuantizeError::Size {
                needed: 34,
                found: 10,
                ..
            })
        ));
        assert!(TensorType::from_raw(9999).is_none());
    }
}
