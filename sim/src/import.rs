//! Foreign traces: raw u8 expert indices, `[tokens][layers][top-k]`, optionally cut into segments by
//! a CSV file with the columns `repetition`, `n_tokens` and `offset_tokens`.

use hotpin_controllers::trace::{Phase, TraceEncoder, TraceError, TraceHeader};
use liblzma::read::XzDecoder;
use std::io::{self, Read};
use std::ops::Range;

/// What an xz file begins with.
const XZ_MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];

/// Most bytes of raw ids that a compressed file may hold.
pub const MOST_RAW_BYTES: u64 = 4 << 30;

/// Most experts a layer whose indices fit a byte.
const MOST_EXPERTS: u32 = 256;

/// Why raw ids or their segments were refused.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The compressed file does not decompress.
    #[error("the file is compressed with xz and damaged: {source}")]
    Compressed {
        /// What the decompressor says.
        source: io::Error,
    },
    /// The compressed file holds too much.
    #[error("the compressed file holds more than {most} bytes")]
    TooLong {
        /// The most that is read.
        most: u64,
    },
    /// The size is not a whole number of tokens.
    #[error(
        "{bytes} bytes are not a whole number of tokens of {token_bytes} bytes (layers x top-k)"
    )]
    PartialToken {
        /// Bytes given.
        bytes: usize,
        /// Bytes of one token.
        token_bytes: usize,
    },
    /// Raw ids are single bytes.
    #[error("{experts} experts a layer do not fit raw ids of one byte; at most {MOST_EXPERTS}")]
    TooManyExperts {
        /// Experts a layer.
        experts: u32,
    },
    /// An index that the model does not have, or the same twice in one layer.
    #[error(
        "expert index {index} at byte {offset} is not below {experts} or repeats one of its layer"
    )]
    BadIndex {
        /// Offset in the raw file.
        offset: usize,
        /// What is there.
        index: u8,
        /// Experts a layer.
        experts: u32,
    },
    /// The segments' header lacks a column.
    #[error("segments have no column {column:?} in line 1")]
    NoColumn {
        /// The column.
        column: &'static str,
    },
    /// A field of the segments is not what it should be.
    #[error("segments line {line}: {column} is {given:?}, not {expected}")]
    BadField {
        /// Line, from 1.
        line: usize,
        /// The column.
        column: &'static str,
        /// What is there.
        given: String,
        /// What should be.
        expected: &'static str,
    },
    /// A segment lies outside the raw ids.
    #[error("segments line {line} ends at token {end}; the raw ids have {tokens}")]
    Outside {
        /// Line, from 1.
        line: usize,
        /// First token after the segment.
        end: u64,
        /// Tokens of the raw ids.
        tokens: usize,
    },
    /// Two segments share tokens.
    #[error("segments line {line} shares tokens with line {other}")]
    Overlap {
        /// Line of the one that begins later, from 1.
        line: usize,
        /// Line of the other.
        other: usize,
    },
    /// The trace could not be encoded.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// One segment of the raw ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its tokens.
    pub tokens: Range<usize>,
    /// A degenerate loop, better left out of measurements.
    pub repetition: bool,
    /// Where the prompt came from: the columns `dataset` and `category`, as far as they exist.
    pub label: String,
}

/// Reads the segments of `tokens` raw tokens from CSV text. Other columns are ignored.
///
/// # Errors
/// When a column is missing, a field is malformed, or a segment lies outside or upon another.
pub fn segments(csv: &str, tokens: usize) -> Result<Vec<Segment>, ImportError> {
    let mut lines = csv.lines().enumerate();
    let names = fields(lines.next().map_or("", |(_, line)| line));
    let column = |column: &'static str| {
        names
            .iter()
            .position(|name| name.trim() == column)
            .ok_or(ImportError::NoColumn { column })
    };
    let repetition = column("repetition")?;
    let (count, offset) = (column("n_tokens")?, column("offset_tokens")?);
    let label: Vec<usize> = ["dataset", "category"]
        .into_iter()
        .filter_map(|name| column(name).ok())
        .collect();
    let rows = lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            let line_fields = fields(line);
            let row = Row {
                line: number + 1,
                fields: &line_fields,
            };
            let start = row.number(offset, "offset_tokens")?;
            let end = start.saturating_add(row.number(count, "n_tokens")?);
            let bounds = usize::try_from(start).ok().zip(usize::try_from(end).ok());
            let range = bounds.filter(|&(_, end)| end <= tokens);
            let (start, end) = range.ok_or(ImportError::Outside {
                line: row.line,
                end,
                tokens,
            })?;
            let segment = Segment {
                tokens: start..end,
                repetition: row.truth(repetition, "repetition")?,
                label: label
                    .iter()
                    .map(|&at| row.field(at))
                    .collect::<Vec<_>>()
                    .join("/"),
            };
            Ok((row.line, segment))
        });
    let rows = rows.collect::<Result<Vec<_>, ImportError>>()?;
    apart(&rows)?;
    Ok(rows.into_iter().map(|(_, segment)| segment).collect())
}

/// Refuses segments that share tokens: a short file of rows would otherwise become a trace of any size.
fn apart(rows: &[(usize, Segment)]) -> Result<(), ImportError> {
    let mut by_start: Vec<_> = rows
        .iter()
        .filter(|(_, segment)| !segment.tokens.is_empty())
        .collect();
    by_start.sort_by_key(|(line, segment)| (segment.tokens.start, *line));
    for two in by_start.windows(2) {
        let [(other, before), (line, after)] = two else {
            continue;
        };
        if after.tokens.start < before.tokens.end {
            return Err(ImportError::Overlap {
                line: *line,
                other: *other,
            });
        }
    }
    Ok(())
}

/// Encodes raw ids as a trace; of `segments`, those given, in that order, each as a prompt.
///
/// # Errors
/// When the ids are of the wrong size or none of the model's. The model's layers must be alike, of
/// at most 256 experts.
pub fn encode(
    header: &TraceHeader,
    raw: &[u8],
    segments: Option<&[Segment]>,
) -> Result<Vec<u8>, ImportError> {
    let tokens = token_count(header, raw)?;
    let mut encoder = TraceEncoder::new(header)?.compact();
    let Some(segments) = segments else {
        push_tokens(&mut encoder, header, raw, 0..tokens)?;
        return Ok(encoder.finish());
    };
    for segment in segments {
        encoder.prompt(&segment.label)?;
        push_tokens(&mut encoder, header, raw, segment.tokens.clone())?;
    }
    Ok(encoder.finish())
}

fn push_tokens(
    encoder: &mut TraceEncoder,
    header: &TraceHeader,
    raw: &[u8],
    tokens: Range<usize>,
) -> Result<(), ImportError> {
    let shape = &header.shape;
    let (experts, top_k) = (shape.experts_in(0), shape.top_k_in(0) as usize);
    let token_bytes = shape.routed_per_token() as usize;
    let mut routed = Vec::with_capacity(token_bytes);
    for token in tokens {
        let start = token * token_bytes;
        let ids = &raw[start..start + token_bytes];
        routed.clear();
        for (slot, &index) in ids.iter().enumerate() {
            let layer = slot / top_k;
            if u32::from(index) >= experts || ids[layer * top_k..slot].contains(&index) {
                return Err(ImportError::BadIndex {
                    offset: start + slot,
                    index,
                    experts,
                });
            }
            routed.push(shape.id(layer, u32::from(index)).0);
        }
        encoder.push(Phase::Decode, &routed)?;
    }
    Ok(())
}

/// The ids of a file: itself, or what it holds when it is compressed with xz.
///
/// # Errors
/// When it is damaged or holds more than [`MOST_RAW_BYTES`].
pub fn unpack(file: Vec<u8>) -> Result<Vec<u8>, ImportError> {
    if !file.starts_with(&XZ_MAGIC) {
        return Ok(file);
    }
    let mut raw = Vec::new();
    let most = MOST_RAW_BYTES;
    XzDecoder::new_multi_decoder(file.as_slice())
        .take(most + 1)
        .read_to_end(&mut raw)
        .map_err(|source| ImportError::Compressed { source })?;
    if raw.len() as u64 > most {
        return Err(ImportError::TooLong { most });
    }
    Ok(raw)
}

/// Tokens in the raw ids of a model whose layers are alike.
///
/// # Errors
/// When the ids are of the wrong size, or the model has too many experts a layer.
pub fn token_count(header: &TraceHeader, raw: &[u8]) -> Result<usize, ImportError> {
    let experts = header.shape.experts_in(0);
    let token_bytes = header.shape.routed_per_token() as usize;
    if experts > MOST_EXPERTS {
        return Err(ImportError::TooManyExperts { experts });
    }
    if !raw.len().is_multiple_of(token_bytes) {
        return Err(ImportError::PartialToken {
            bytes: raw.len(),
            token_bytes,
        });
    }
    Ok(raw.len() / token_bytes)
}

/// One line of the segments.
struct Row<'a> {
    line: usize,
    fields: &'a [String],
}

impl Row<'_> {
    fn number(&self, at: usize, column: &'static str) -> Result<u64, ImportError> {
        self.field(at)
            .parse()
            .map_err(|_| self.bad(at, column, "a number of tokens"))
    }

    fn truth(&self, at: usize, column: &'static str) -> Result<bool, ImportError> {
        match self.field(at) {
            "True" | "true" => Ok(true),
            "False" | "false" => Ok(false),
            _ => Err(self.bad(at, column, "True or False")),
        }
    }

    fn field(&self, at: usize) -> &str {
        self.fields.get(at).map_or("", |field| field.trim())
    }

    fn bad(&self, at: usize, column: &'static str, expected: &'static str) -> ImportError {
        ImportError::BadField {
            line: self.line,
            column,
            given: self.field(at).to_owned(),
            expected,
        }
    }
}

/// Splits a line of CSV; fields in double quotes may hold commas and doubled quotes.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        let at = fields.len() - 1;
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                fields[at].push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            c => fields[at].push(c),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotpin_controllers::ModelShape;
    use hotpin_controllers::trace::Trace;

    const CSV: &str = "name,repetition,n_tokens,offset_tokens\n\
                       \"a, \"\"b\"\"\",False,2,0\nc,True,1,2\n\nd,False,1,3\n";

    fn header() -> TraceHeader {
        TraceHeader {
            model: "m".to_owned(),
            architecture: String::new(),
            dense_bytes: 0,
            shape: ModelShape::uniform(2, 4, 1, 2).unwrap(),
        }
    }

    #[test]
    fn segments_are_cut_out_in_order() {
        let raw: Vec<u8> = (0..4).flat_map(|t| [t, (t + 1) % 4, 3, 0]).collect();
        let kept: Vec<_> = segments(CSV, 4)
            .unwrap()
            .into_iter()
            .filter(|segment| !segment.repetition)
            .collect();
        let kept_tokens: Vec<_> = kept.iter().map(|s| s.tokens.clone()).collect();
        assert_eq!(kept_tokens, [0..2, 3..4]);
        let trace = Trace::decode(&encode(&header(), &raw, Some(&kept)).unwrap()).unwrap();
        assert_eq!(trace.tokens(), 3);
        assert_eq!(trace.token(2), [3, 0, 7, 4]);
        let begins: Vec<_> = trace.prompts().iter().map(|(at, _)| *at).collect();
        assert_eq!(begins, [0, 2]);
        assert_eq!(
            Trace::decode(&encode(&header(), &raw, None).unwrap())
                .unwrap()
                .tokens(),
            4
        );
    }

    #[test]
    fn bad_input_is_named() {
        let message = |raw: &[u8]| encode(&header(), raw, None).unwrap_err().to_string();
        let torn = unpack(b"\xfd7zXZ\0..".to_vec()).unwrap_err().to_string();
        assert!(torn.contains("damaged"), "{torn}");
        assert_eq!(unpack(vec![1, 2]).unwrap(), [1, 2]);
        assert!(message(&[0; 5]).contains("5 bytes"));
        assert!(message(&[0, 1, 2, 3, 0, 1, 2, 4]).contains("byte 7"));
        assert!(message(&[0, 1, 2, 2]).contains("byte 3"));
        let csv = |text: &str| segments(text, 3).unwrap_err().to_string();
        assert!(csv("a,b").contains("repetition"));
        assert!(csv(CSV).contains("line 5 ends at token 4"));
        assert!(csv("repetition,n_tokens,offset_tokens\nFalse,x,0").contains("line 2: n_tokens"));
        assert!(csv("repetition,n_tokens,offset_tokens\nmaybe,1,0").contains("True or False"));
        let twice = "repetition,n_tokens,offset_tokens\nFalse,2,1\nFalse,2,0\nFalse,0,1";
        assert!(csv(twice).contains("line 2 shares tokens with line 3"));
        assert!(
            csv("repetition,n_tokens,offset_tokens\nFalse,18446744073709551615,2")
                .contains("line 2 ends at token")
        );
    }
}
