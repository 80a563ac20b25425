//! How the values of a port's keys are written, on the command line and in a file: one type for each form. Each reads
//! a value, and describes itself in the JSON Schema of configuration files.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use nix::unistd::{Group, User};
use offcore_wire::ethernet::MacAddr;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

use super::{MAX_INTERFACE_NAME, MAX_SOCKET_PATH};

/// Reads a value that may be a number, a switch or a text.
struct Scalar<T, F> {
    /// Converts a number or a text; `None` if it is wrong. Text on the command line may omit the value: `None`.
    read: F,
    /// The expected values, for errors.
    expected: String,
    value: PhantomData<T>,
}

/// A value as written.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    Number(u64),
    Switch(bool),
    Text(&'a str),
    /// A key without a value.
    Missing,
}

impl<T, F: Fn(Found<'_>) -> Option<T>> Scalar<T, F> {
    fn convert<E: Error>(self, found: Found<'_>) -> Result<T, E> {
        (self.read)(found).ok_or_else(|| E::custom(format_args!("expected {}", self.expected)))
    }
}

impl<T, F: Fn(Found<'_>) -> Option<T>> Visitor<'_> for Scalar<T, F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.expected)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<T, E> {
        self.convert(Found::Switch(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        match u64::try_from(value) {
            Ok(value) => self.convert(Found::Number(value)),
            Err(_) => Err(E::custom(format_args!("expected {}", self.expected))),
        }
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        self.convert(Found::Number(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<T, E> {
        self.convert(Found::Text(value))
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        self.convert(Found::Missing)
    }
}

/// Reads one value with `read`. The error says that it is not as `expected`.
///
/// # Errors
/// `read` returns `None`, or the value is neither a number, a switch nor a text.
pub fn scalar<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: impl Into<String>,
    read: impl Fn(Found<'_>) -> Option<T>,
) -> Result<T, D::Error> {
    deserializer.deserialize_any(Scalar { read, expected: expected.into(), value: PhantomData })
}

/// Reads a text with `read`, whose error names the found and the expected value.
fn text<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    let found = scalar(deserializer, "a string", |found| match found {
        Found::Text(text) => Some(text.to_owned()),
        _ => None,
    })?;
    read(&found).map_err(D::Error::custom)
}

/// Implements `JsonSchema` for a type that describes a form of values.
macro_rules! described {
    ($(<$(const $range:ident),+>)? $form:ident, $schema:tt) => {
        impl $(<$(const $range: u64),+>)? JsonSchema for $form $(<$($range),+>)? {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($form).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    };
}

/// A number from `MIN` to `MAX`. As text it may end in k, M or G (decimal).
#[derive(Debug)]
pub struct Number<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Number<MIN, MAX> {
    /// Reads a number.
    ///
    /// # Errors
    /// Another value, or a number outside the range.
    pub fn read<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: TryFrom<u64>,
    {
        scalar(deserializer, Self::expected(), Self::convert)
    }

    /// Reads a number for a key that may be absent.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn optional<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: TryFrom<u64>,
    {
        Self::read(deserializer).map(Some)
    }

    /// Reads a number that must be a power of two.
    ///
    /// # Errors
    /// As for [`read`](Self::read), or another number.
    pub fn power_of_two<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: TryFrom<u64>,
    {
        let number: u64 = Self::read(deserializer)?;
        T::try_from(number)
            .ok()
            .filter(|_| number.is_power_of_two())
            .ok_or_else(|| D::Error::custom(format_args!("expected a power of two from {MIN} to {MAX}")))
    }

    /// Reads `off` (0), `on` (1) or a number.
    pub(super) fn or_switch<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: TryFrom<u64>,
    {
        scalar(deserializer, format!("{}, or on or off", Self::expected()), |found| match found {
            Found::Switch(on) => T::try_from(on.into()).ok(),
            Found::Text("on") | Found::Missing => T::try_from(1).ok(),
            Found::Text("off") => T::try_from(0).ok(),
            other => Self::convert(other),
        })
    }

    fn expected() -> String {
        format!("a number from {MIN} to {MAX}")
    }

    fn convert<T: TryFrom<u64>>(found: Found<'_>) -> Option<T> {
        let number = match found {
            Found::Number(number) => number,
            Found::Text(text) => parse_number(text)?,
            Found::Switch(_) | Found::Missing => return None,
        };
        T::try_from(number).ok().filter(|_| (MIN..=MAX).contains(&number))
    }
}

described!(<const MIN, const MAX> Number, {
    "anyOf": [
        { "type": "integer", "minimum": MIN, "maximum": MAX },
        { "type": "string", "pattern": "^[0-9]+[kMG]?$" }
    ]
});

/// A number, or a switch.
pub(super) struct NumberOrSwitch;

described!(NumberOrSwitch, {
    "anyOf": [
        { "type": "integer", "minimum": 1 },
        { "type": "string", "pattern": "^([0-9]+[kMG]?|on|off)$" },
        { "type": "boolean" }
    ]
});

/// The number of queue pairs of a port.
pub(super) type Queues = Number<1, { super::MAX_QUEUES as u64 }>;

/// Parses a decimal number that may end in k, M or G.
pub(super) fn parse_number(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'k' => (&text[..text.len() - 1], 1_000),
        b'M' => (&text[..text.len() - 1], 1_000_000),
        b'G' => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text, 1),
    };
    // `parse` alone would also accept "+1".
    let number: u64 = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())??;
    number.checked_mul(unit)
}

/// A switch: `true` and `false` in a file; `on`, `off`, or the key alone on the command line.
#[derive(Debug)]
pub struct Switch;

impl Switch {
    /// Reads a switch.
    ///
    /// # Errors
    /// Another value.
    pub fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
        scalar(deserializer, "on or off", |found| match found {
            Found::Switch(on) => Some(on),
            Found::Missing | Found::Text("on") => Some(true),
            Found::Text("off") => Some(false),
            _ => None,
        })
    }
}

described!(Switch, { "type": "boolean" });

/// A size in MiB, or with the suffix M or G (binary).
pub(super) struct Mebibytes;

impl Mebibytes {
    pub(super) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
        let size = scalar(deserializer, "a size of at least 1 MiB, such as 512 (MiB), 512M or 4G", |found| {
            match found {
                Found::Number(number) => u32::try_from(number).ok().filter(|size| *size > 0),
                Found::Text(text) => Self::parse(text),
                _ => None,
            }
        });
        size.map(Some)
    }

    fn parse(text: &str) -> Option<u32> {
        let (digits, mib) = match text.strip_suffix('G') {
            Some(digits) => (digits, 1024),
            None => (text.strip_suffix('M').unwrap_or(text), 1),
        };
        let number: u32 = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())??;
        number.checked_mul(mib).filter(|size| *size > 0)
    }
}

described!(Mebibytes, {
    "anyOf": [{ "type": "integer", "minimum": 1 }, { "type": "string", "pattern": "^[0-9]+[MG]?$" }]
});

/// Permissions in octal digits, as in chmod(1).
pub(super) struct Permissions;

impl Permissions {
    pub(super) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
        let mode = scalar(deserializer, "permissions in octal, such as \"0660\"", |found| match found {
            Found::Text(text) if !text.starts_with('+') => u32::from_str_radix(text, 8).ok(),
            _ => None,
        });
        mode.and_then(|mode| match mode {
            ..=0o777 => Ok(Some(mode)),
            _ => Err(D::Error::custom("expected permissions in octal, from 0000 to 0777")),
        })
    }
}

described!(Permissions, { "type": "string", "pattern": "^[0-7]{1,4}$" });

/// A user or a group, by name or number.
#[derive(Debug)]
pub struct Account;

impl Account {
    /// Reads a user, for a key that may be absent.
    ///
    /// # Errors
    /// The user does not exist.
    pub fn user<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
        let by_name = |name: &str| User::from_name(name).ok().flatten().map(|user| user.uid.as_raw());
        Self::read(deserializer, "user", by_name)
    }

    /// Reads a group, for a key that may be absent.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn group<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
        let by_name = |name: &str| Group::from_name(name).ok().flatten().map(|group| group.gid.as_raw());
        Self::read(deserializer, "group", by_name)
    }

    fn read<'de, D: Deserializer<'de>>(
        deserializer: D,
        what: &str,
        by_name: impl Fn(&str) -> Option<u32>,
    ) -> Result<Option<u32>, D::Error> {
        let expected = format!("an existing {what}, by name or number");
        let id = scalar(deserializer, expected, |found| match found {
            Found::Number(number) => u32::try_from(number).ok(),
            Found::Text(text) => text.parse().ok().or_else(|| by_name(text)),
            _ => None,
        });
        id.and_then(|id| match id {
            // The highest id means "no id".
            u32::MAX => Err(D::Error::custom(format_args!("expected an existing {what}, by name or number"))),
            id => Ok(Some(id)),
        })
    }
}

described!(Account, { "type": ["string", "integer"] });

/// The Ethernet address of one station.
pub(super) struct Station;

impl Station {
    pub(super) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MacAddr>, D::Error> {
        let mac: MacAddr = text(deserializer, |text| text.parse().map_err(|error| format!("{error}")))?;
        match mac.is_unicast() {
            true => Ok(Some(mac)),
            false => Err(D::Error::custom("expected a unicast MAC address")),
        }
    }
}

described!(Station, { "type": "string", "pattern": "^([0-9a-fA-F]{1,2}:){5}[0-9a-fA-F]{1,2}$" });

/// The path of a Unix socket.
pub(super) struct SocketPath;

impl SocketPath {
    pub(super) fn read<'de, D: Deserializer<'de>, T>(deserializer: D) -> Result<T, D::Error>
    where
        T: for<'a> From<&'a str>,
    {
        text(deserializer, |path| match path.len() {
            0 => Err("expected the socket's path".into()),
            1..=MAX_SOCKET_PATH => Ok(T::from(path)),
            found => Err(format!("socket path has {found} bytes, expected at most {MAX_SOCKET_PATH}")),
        })
    }
}

described!(SocketPath, { "type": "string", "minLength": 1, "maxLength": MAX_SOCKET_PATH });

/// The name of a network interface, by the kernel's rules.
pub(super) struct Interface;

impl Interface {
    pub(super) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
        text(deserializer, |name| {
            let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
            let found = name.len();
            if found > MAX_INTERFACE_NAME {
                return Err(format!(
                    "interface name '{name}' has {found} bytes, expected at most {MAX_INTERFACE_NAME}"
                ));
            }
            if name.is_empty() || name.contains(bad) || matches!(name, "." | "..") {
                return Err(format!("interface name '{name}': expected one without '/', ':' or whitespace"));
            }
            Ok(name.into())
        })
    }
}

described!(Interface, { "type": "string", "minLength": 1, "maxLength": MAX_INTERFACE_NAME });

/// A text that is passed on unchanged, in brackets on the command line.
pub(super) struct Bracketed;

impl Bracketed {
    pub(super) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
        let expected = "a string, on the command line in brackets";
        let text = scalar(deserializer, expected, |found| match found {
            Found::Text(text) => Some(inner(text).to_owned()).filter(|text| !text.is_empty()),
            _ => None,
        });
        text.map(Some)
    }
}

described!(Bracketed, { "type": "string", "minLength": 1 });

/// Returns the text inside the brackets, if there are any.
pub(super) fn inner(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text)
}

/// A time from `MIN` to `MAX` nanoseconds: a whole number with a unit of ns, us, ms, s, m or h.
#[derive(Debug)]
pub struct Time<const MIN: u64, const MAX: u64>;

/// Units from large to small, in nanoseconds.
const UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

impl<const MIN: u64, const MAX: u64> Time<MIN, MAX> {
    /// Reads a time.
    ///
    /// # Errors
    /// Another value, or a time outside the range.
    pub fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let [least, most] = [MIN, MAX].map(|nanos| show_time(Duration::from_nanos(nanos)));
        let nanos = scalar(deserializer, format!("a time from {least} to {most}"), |found| match found {
            Found::Text(text) => parse_time(text).filter(|nanos| (MIN..=MAX).contains(nanos)),
            _ => None,
        });
        nanos.map(Duration::from_nanos)
    }

    /// Reads a time for a key that may be absent.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Self::read(deserializer).map(Some)
    }

    /// Writes a time.
    ///
    /// # Errors
    /// The serializer's.
    #[allow(clippy::ref_option, reason = "serde passes fields by reference")]
    pub fn write<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&time.map_or_else(String::new, show_time))
    }
}

described!(<const MIN, const MAX> Time, { "type": "string", "pattern": "^[0-9]+(ns|us|ms|s|m|h)$" });

/// Parses a time in nanoseconds.
fn parse_time(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

/// Writes a time in seconds, or the largest smaller unit without a remainder.
pub fn show_time(time: Duration) -> String {
    let nanos = time.as_nanos() as u64;
    let unit = UNITS.iter().skip(2).find(|(_, factor)| nanos.is_multiple_of(*factor));
    let (name, factor) = unit.unwrap_or(&("ns", 1));
    format!("{}{name}", nanos / factor)
}

/// Implements reading, and the schema, of an enum that `named!` declares.
macro_rules! read_by_name {
    ($($name:ident),+) => {$(
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let expected = format!("one of {}", Self::NAMES.join(", "));
                $crate::spec::values::scalar(deserializer, expected, |found| match found {
                    $crate::spec::values::Found::Text(text) => Self::find(text),
                    _ => None,
                })
            }
        }

        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "enum": Self::NAMES })
            }
        }
    )+};
}
pub(super) use read_by_name;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_round_trip() {
        for (text, nanos) in
            [("20us", 20_000), ("1500ms", 1_500_000_000), ("300s", 300_000_000_000), ("0s", 0)]
        {
            assert_eq!(parse_time(text), Some(nanos));
            assert_eq!(parse_time(&show_time(Duration::from_nanos(nanos))), Some(nanos));
        }
        assert_eq!(parse_time("2m"), Some(120_000_000_000));
        for wrong in ["", "5", "s", "-1s", "1.5s", "1 s", "9999999999h", "1é"] {
            assert_eq!(parse_time(wrong), None, "{wrong}");
        }
    }
}
