//! Explanations of pasted text: a code, a completion record in hex, or a record and its descriptor.

use crate::completion::{Completed, Status};
use crate::descriptor::Descriptor;

use super::codes::{command_error, kernel_error, software_error};
use super::{Explanation, descriptor, record, status};

/// Text that is neither a code nor a record.
#[derive(Clone, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum ExplainError {
    /// nothing to explain: give a status code (0x83), a cmd_status (0x80050000, cmd 0x15), or the 32 bytes of a
    /// completion record in hex, followed by the 64 bytes of its descriptor if you have them
    Empty,
    /// '{text}' is not hexadecimal: expected a code such as 0x83, or bytes such as 83000700
    NotHex { text: String },
    /// {code:#x} is no code: expected an operation status (0x00 to 0x3f, with 0x80 added for a write), a SWERROR code
    /// (0x51 to 0x54), or a cmd_status (cmd 0x10, 0x80000010 and up)
    NoCode { code: u64 },
    /// {bytes} bytes: expected a completion record (32), a descriptor (64), or a record followed by its descriptor
    /// (96)
    Length { bytes: usize },
}

/// Explains the arguments of a command line: a status code (`0x83`, `3`), a `cmd_status` (`0x80050000`, or `cmd 0x15`),
/// a completion record of 32 bytes in hex, a descriptor of 64 bytes, or a record followed by its descriptor.
///
/// Bytes are given in memory order, with or without spaces, commas and colons, or as words printed by a debugger: `0x`
/// followed by 8 or 16 digits is one word, and its bytes are reversed.
///
/// # Errors
///
/// Text in none of these formats.
pub fn from_text(arguments: &[String]) -> Result<String, ExplainError> {
    let tokens: Vec<&str> = arguments
        .iter()
        .flat_map(|argument| argument.split(|c: char| c.is_whitespace() || matches!(c, ',' | ':' | '=')))
        .filter(|token| !token.is_empty())
        .collect();
    match tokens[..] {
        [] => Err(ExplainError::Empty),
        [name, code] if name.eq_ignore_ascii_case("cmd") || name.eq_ignore_ascii_case("cmd_status") => {
            let code = number(code)?;
            of_command(code).map(|text| text.to_string()).ok_or(ExplainError::NoCode { code })
        }
        [code] if digits(code).len() <= 8 => of_code(code),
        _ => of_bytes(&tokens),
    }
}

fn digits(token: &str) -> &str {
    token.strip_prefix("0x").or_else(|| token.strip_prefix("0X")).unwrap_or(token)
}

fn not_hex(text: &str) -> ExplainError {
    ExplainError::NotHex { text: text.to_owned() }
}

/// Parses a number: hexadecimal with `0x` or with letters, otherwise decimal.
fn number(token: &str) -> Result<u64, ExplainError> {
    let text = digits(token);
    let radix = if text.len() == token.len() && text.bytes().all(|c| c.is_ascii_digit()) { 10 } else { 16 };
    u64::from_str_radix(text, radix).map_err(|_| not_hex(token))
}

fn of_command(code: u64) -> Option<Explanation> {
    let code = u32::try_from(code).ok()?;
    match u8::try_from(code) {
        Ok(code) => command_error(code),
        Err(_) => kernel_error(code),
    }
}

fn of_code(token: &str) -> Result<String, ExplainError> {
    let code = number(token)?;
    let hexadecimal = u64::from_str_radix(digits(token), 16).map_err(|_| not_hex(token))?;
    if hexadecimal == code {
        return Ok(any_code(code).ok_or(ExplainError::NoCode { code })?.to_string());
    }
    // Programs print codes in both radixes, so explain both readings.
    match (any_code(code), any_code(hexadecimal)) {
        (None, None) => Err(ExplainError::NoCode { code }),
        (Some(only), None) | (None, Some(only)) => Ok(only.to_string()),
        (Some(decimal), Some(hexadecimal)) => Ok(format!(
            "{token} as a decimal number is {decimal}\n{token} as a hexadecimal number is {hexadecimal}"
        )),
    }
}

fn any_code(code: u64) -> Option<Explanation> {
    let Ok(byte) = u8::try_from(code) else { return of_command(code) };
    if byte & 0x40 != 0 {
        return software_error(byte);
    }
    let mut explanation = status(Status(byte & 0x3f));
    if byte & 0x80 != 0 {
        explanation.title = format!("0x{byte:02x}: bit 7: on a write; {}", explanation.title);
    }
    Some(explanation)
}

fn of_bytes(tokens: &[&str]) -> Result<String, ExplainError> {
    let mut bytes = Vec::new();
    for token in tokens {
        let text = digits(token);
        if !text.len().is_multiple_of(2) || !text.is_ascii() {
            return Err(not_hex(token));
        }
        let start = bytes.len();
        for at in (0..text.len()).step_by(2) {
            let pair = &text[at..at + 2];
            bytes.push(u8::from_str_radix(pair, 16).map_err(|_| not_hex(token))?);
        }
        let is_word = text.len() < token.len() && matches!(text.len(), 8 | 16);
        if is_word {
            bytes[start..].reverse();
        }
    }
    if let Ok(bytes) = <&[u8; 64]>::try_from(bytes.as_slice()) {
        return Ok(descriptor(&Descriptor::from_bytes(bytes)).to_string());
    }
    let wrong = || ExplainError::Length { bytes: bytes.len() };
    let (head, tail) = bytes.split_first_chunk::<32>().ok_or_else(wrong)?;
    let descriptor = match <&[u8; 64]>::try_from(tail) {
        Ok(bytes) => Some(Descriptor::from_bytes(bytes)),
        Err(_) if tail.is_empty() => None,
        Err(_) => return Err(wrong()),
    };
    Ok(record(descriptor.as_ref(), &completed(head)).to_string())
}

/// Decodes a completion record from 32 bytes.
fn completed(bytes: &[u8; 32]) -> Completed {
    let word = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    Completed {
        status: Status(bytes[0] & 0x3f),
        fault_was_write: bytes[0] & 0x80 != 0,
        result: bytes[1],
        fault_info: bytes[2],
        completed: (word(0) >> 32) as u32,
        fault_address: word(8),
        specific: [word(16), word(24)],
    }
}
