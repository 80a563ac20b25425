//! accel-config files of any content: parsed or refused, and the same after they have been written and parsed again.

use offcore_dsa::config::{BUILT_IN, DeviceCapabilities, DeviceConfig, built_in, check, commands, json};

use crate::script::Script;

/// Maximum number of edits of a file.
const EDITS: usize = 8;
const WORDS: [&str; 20] = [
    "null",
    "true",
    "-1",
    "0",
    "1e99",
    "4294967296",
    "\"\"",
    "[]",
    "{}",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"size\"",
    "\"wq0.0\"",
    "\"engine0.9\"",
    "\"dedicated\"",
    "\"\\u0000\"",
];

/// The results of scripts: files that were parsed and refused, and devices whose rules hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) parsed: u64,
    pub(crate) refused: u64,
    pub(crate) valid: u64,
}

/// Parses a text, an edited built-in layout or the script's own bytes, and adds the results.
pub(crate) fn play(bytes: &[u8], outcome: &mut Outcome) {
    let mut script = Script(bytes);
    let text = if script.u8() < 192 { edited(&mut script) } else { String::from_utf8_lossy(script.0).into() };
    let Ok(loaded) = json::parse(&text) else {
        outcome.refused += 1;
        return;
    };
    outcome.parsed += 1;
    let written = json::write(&loaded.devices);
    let again = json::parse(&written).expect("our own file");
    assert_eq!(json::write(&again.devices), written);
    for device in [DeviceCapabilities::spr(), DeviceCapabilities::dsa2()] {
        for config in &loaded.devices {
            let _ = check(config, &device);
            let mut config: DeviceConfig = config.clone().renamed("dsa7");
            config.fit(&device);
            if check(&config, &device).is_ok() {
                outcome.valid += 1;
                assert!(!commands::commands(&config, &device).is_empty());
            }
        }
    }
}

/// Returns the file of a built-in layout, with parts removed, repeated and replaced by words that occur in such files.
fn edited(script: &mut Script<'_>) -> String {
    let name = BUILT_IN[script.below(BUILT_IN.len())];
    let layout = built_in(name, &DeviceCapabilities::spr()).unwrap();
    let mut text = json::write(&[layout]);
    assert!(text.is_ascii());
    for _ in 0..usize::from(script.u8()) % EDITS {
        let at = script.below(text.len());
        let end = (at + usize::from(script.u8() % 32)).min(text.len());
        match script.u8() % 4 {
            0 => text.replace_range(at..end, ""),
            1 => {
                let part = text[at..end].to_owned();
                text.insert_str(at, &part);
            }
            2 => text.insert_str(at, WORDS[script.below(WORDS.len())]),
            // The value after the next colon.
            _ => {
                let Some(colon) = text[at..].find(':').map(|colon| at + colon + 1) else { continue };
                let end = text[colon..].find([',', '\n', '}']).map_or(text.len(), |end| colon + end);
                let number = script.u16().to_string();
                let word = if script.u8() < 128 { &number } else { WORDS[script.below(WORDS.len())] };
                text.replace_range(colon..end, word);
            }
        }
        if text.is_empty() {
            break;
        }
    }
    text
}
