//! How values are written in a file, in addition to [`offcore_port::spec::values`]: names from a fixed set, and sizes.

use std::borrow::Cow;
use std::marker::PhantomData;

use offcore_dma::Mode;
use offcore_flow::switch::Workload;
use offcore_flow::{Idle, Topology};
use offcore_gpu::device::{Launch, Memory};
use offcore_mem::Hugepages;
use offcore_port::spec::values::{Found, scalar};
use offcore_tcp::proto::Algorithm;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserializer, Serializer};

/// A type whose values have names.
pub trait Choices: Copy + PartialEq + 'static {
    /// The values and their names.
    const ALL: &'static [(&'static str, Self)];

    /// Returns the name.
    fn name_of(self) -> &'static str {
        Self::ALL.iter().find(|(_, value)| *value == self).map_or("", |(name, _)| name)
    }
}

macro_rules! choices {
    ($($type:ty: $($name:literal = $value:expr),+;)+) => {$(
        impl Choices for $type {
            const ALL: &'static [(&'static str, Self)] = &[$(($name, $value)),+];
        }
    )+};
}

choices! {
    Topology: "paired" = Self::Paired, "chained" = Self::Chained, "loop" = Self::Loop;
    Mode: "cpu" = Self::Cpu, "offload" = Self::Offload, "auto" = Self::Auto;
    Idle: "poll" = Self::Poll, "sleep" = Self::Sleep;
    Hugepages: "auto" = Self::Auto, "1G" = Self::Size1G, "2M" = Self::Size2M, "none" = Self::None;
    Memory: "host" = Self::Host, "gpu" = Self::Gpu, "direct" = Self::Direct;
    Algorithm: "cubic" = Self::Cubic, "reno" = Self::NewReno, "bbr" = Self::Bbr;
    Workload: "none" = Self::None, "cpu" = Self::Cpu, "kernel" = Self::Device(Launch::Kernel),
        "persistent" = Self::Device(Launch::Persistent), "graph" = Self::Device(Launch::Graph);
}

/// A name from a fixed set. As a type it describes itself in the schema.
#[derive(Debug)]
pub(crate) struct Choice<T>(PhantomData<T>);

impl<T: Choices> JsonSchema for Choice<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Choice".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let names: Vec<&str> = T::ALL.iter().map(|(name, _)| *name).collect();
        json_schema!({ "type": "string", "enum": names })
    }
}

/// Reads and writes a name from a fixed set.
pub(crate) mod choice {
    use super::{Choices, Deserializer, Found, Serializer, scalar};

    pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: Choices>(d: D) -> Result<Option<T>, D::Error> {
        let names: Vec<&str> = T::ALL.iter().map(|(name, _)| *name).collect();
        scalar(d, format!("one of {}", names.join(", ")), |found| match found {
            Found::Text(text) => T::ALL.iter().find(|(name, _)| *name == text).map(|(_, value)| Some(*value)),
            _ => None,
        })
    }

    #[allow(clippy::ref_option, reason = "serde passes fields by reference")]
    pub(crate) fn serialize<S: Serializer, T: Choices>(value: &Option<T>, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(value.map_or("", T::name_of))
    }
}

/// A size in bytes from `MIN` to `MAX`, or with the suffix K, M or G (binary).
#[derive(Debug)]
pub(crate) struct Size<const MIN: usize, const MAX: usize>;

impl<const MIN: usize, const MAX: usize> JsonSchema for Size<MIN, MAX> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [
                { "type": "integer", "minimum": MIN, "maximum": MAX },
                { "type": "string", "pattern": "^[0-9]+[KMG]?$" }
            ]
        })
    }
}

impl<const MIN: usize, const MAX: usize> Size<MIN, MAX> {
    pub(crate) fn optional<'de, D: Deserializer<'de>>(d: D) -> Result<Option<usize>, D::Error> {
        let expected = format!("bytes from {} to {}, such as 512, \"4K\" or \"1M\"", show(MIN), show(MAX));
        let size = scalar(d, expected, |found| {
            let size = match found {
                Found::Number(bytes) => usize::try_from(bytes).ok(),
                Found::Text(text) => parse(text),
                _ => None,
            };
            size.filter(|size| (MIN..=MAX).contains(size))
        });
        size.map(Some)
    }

    #[allow(clippy::ref_option, reason = "serde passes fields by reference")]
    pub(crate) fn write<S: Serializer>(size: &Option<usize>, s: S) -> Result<S::Ok, S::Error> {
        let size = size.unwrap_or_default();
        if size < 1 << 10 { s.serialize_u64(size as u64) } else { s.serialize_str(&show(size)) }
    }
}

fn parse(text: &str) -> Option<usize> {
    let unit = text.len().checked_sub(1).and_then(|last| text.get(last..))?;
    let (digits, shift) = match unit {
        "K" => (&text[..text.len() - 1], 10),
        "M" => (&text[..text.len() - 1], 20),
        "G" => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: usize = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())??;
    number.checked_mul(1 << shift)
}

/// Writes a size in the largest unit without a remainder.
fn show(size: usize) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| size > 0 && size.trailing_zeros() >= *shift);
    unit.map_or_else(|| size.to_string(), |(shift, name)| format!("{}{name}", size >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_trip() {
        for (text, bytes) in [("0", 0), ("512", 512), ("4K", 4096), ("256M", 256 << 20), ("1G", 1 << 30)] {
            assert_eq!((parse(text), show(bytes).as_str()), (Some(bytes), text));
        }
        for wrong in ["", "K", "1k", "+1", "1.5M", "99999999999G", "1é"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
