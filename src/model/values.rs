//! Reads the values of a GGUF header's metadata.

use super::error::ModelError;
use super::metadata::{MAX_KEPT_ELEMENTS, MAX_KEPT_TEXT_BYTES, Value};
use super::source::Source;
use std::io::{Read, Seek};

/// GGUF's value types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ValueType {
    name: &'static str,
    /// Bytes of a value; 0 for texts and arrays.
    bytes: u8,
    class: Class,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Unsigned,
    Signed,
    Float,
    Bool,
    Text,
    Array,
}

fn read_value_type<R: Read + Seek>(source: &mut Source<R>) -> Result<ValueType, ModelError> {
    let at = source.position();
    let id = source.u32("a metadata type")?;
    let (name, bytes, class) = match id {
        0 => ("u8", 1, Class::Unsigned),
        1 => ("i8", 1, Class::Signed),
        2 => ("u16", 2, Class::Unsigned),
        3 => ("i16", 2, Class::Signed),
        4 => ("u32", 4, Class::Unsigned),
        5 => ("i32", 4, Class::Signed),
        6 => ("f32", 4, Class::Float),
        7 => ("bool", 1, Class::Bool),
        8 => ("text", 0, Class::Text),
        9 => ("array", 0, Class::Array),
        10 => ("u64", 8, Class::Unsigned),
        11 => ("i64", 8, Class::Signed),
        12 => ("f64", 8, Class::Float),
        _ => return Err(source.bad(at, format!("metadata type {id} does not exist"))),
    };
    Ok(ValueType { name, bytes, class })
}

/// Reads a value; when `keep` is false it is passed over and the answer means nothing.
pub(super) fn read_value<R: Read + Seek>(
    source: &mut Source<R>,
    keep: bool,
) -> Result<Value, ModelError> {
    let ty = read_value_type(source)?;
    match ty.class {
        Class::Text => read_text(source, keep),
        Class::Array => read_array(source, keep),
        _ => read_scalar(source, ty),
    }
}

fn read_scalar<R: Read + Seek>(source: &mut Source<R>, ty: ValueType) -> Result<Value, ModelError> {
    let mut raw = [0u8; 8];
    let width = usize::from(ty.bytes);
    source.fill(&mut raw[..width], "a metadata value")?;
    if ty.class == Class::Signed && raw[width - 1] & 0x80 != 0 {
        raw[width..].fill(0xff);
    }
    let bits = u64::from_le_bytes(raw);
    Ok(match ty.class {
        Class::Signed if bits.cast_signed() < 0 => Value::Negative(bits.cast_signed()),
        Class::Bool => Value::Bool(bits != 0),
        Class::Float if width == 4 => Value::Float(f64::from(f32::from_le_bytes([
            raw[0], raw[1], raw[2], raw[3],
        ]))),
        Class::Float => Value::Float(f64::from_le_bytes(raw)),
        _ => Value::Uint(bits),
    })
}

fn read_text<R: Read + Seek>(source: &mut Source<R>, keep: bool) -> Result<Value, ModelError> {
    let length = source.u64("the length of a text")?;
    if !keep || length > MAX_KEPT_TEXT_BYTES {
        source.skip(length, "a text")?;
        return Ok(Value::Skipped {
            kind: "text",
            count: length,
        });
    }
    source.check_room(length, 1, "a text")?;
    let mut raw = vec![0u8; usize::try_from(length).unwrap_or(0)];
    source.fill(&mut raw, "a text")?;
    let text = String::from_utf8_lossy(&raw);
    Ok(Value::Text(
        text.chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect(),
    ))
}

fn read_array<R: Read + Seek>(source: &mut Source<R>, keep: bool) -> Result<Value, ModelError> {
    let at = source.position();
    let ty = read_value_type(source)?;
    let count = source.u64("the length of an array")?;
    let skipped = Value::Skipped {
        kind: ty.name,
        count,
    };
    match ty.class {
        // llama.cpp does not read them either, and a depth of one needs no recursion.
        Class::Array => Err(source.bad(
            at,
            "an array of arrays, which llama.cpp does not read".into(),
        )),
        Class::Text => {
            source.check_room(count, 8, "an array of texts")?;
            for _ in 0..count {
                let length = source.u64("the length of a text")?;
                source.skip(length, "a text in an array")?;
            }
            Ok(skipped)
        }
        Class::Float => {
            source.skip(count.saturating_mul(u64::from(ty.bytes)), "an array")?;
            Ok(skipped)
        }
        _ if !keep || count > MAX_KEPT_ELEMENTS => {
            source.skip(count.saturating_mul(u64::from(ty.bytes)), "an array")?;
            Ok(skipped)
        }
        _ => read_uints(source, ty, count),
    }
}

fn read_uints<R: Read + Seek>(
    source: &mut Source<R>,
    ty: ValueType,
    count: u64,
) -> Result<Value, ModelError> {
    source.check_room(count, u64::from(ty.bytes), "an array")?;
    let mut list = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
    let mut negative = false;
    for _ in 0..count {
        match read_scalar(source, ty)? {
            Value::Uint(n) => list.push(n),
            Value::Bool(b) => list.push(u64::from(b)),
            _ => negative = true,
        }
    }
    Ok(if negative {
        Value::Skipped {
            kind: "negative numbers",
            count,
        }
    } else {
        Value::Uints(list)
    })
}
