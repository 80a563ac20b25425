//! The meaning of a device's `cmd_status`, in one line.

use crate::explain::{self, Explanation};

/// Returns the result of the last administrative command, or the error of the kernel's driver, with advice.
pub fn text(status: u32) -> String {
    // Bit 31 marks errors of the kernel's driver. Otherwise the low byte is the device's error code (section 9.2.13).
    let found = match status {
        0 => return "0x0: success".into(),
        _ if status >> 31 == 1 => explain::kernel_error(status),
        _ => explain::command_error((status & 0xff) as u8),
    };
    let Some(Explanation { title, facts, advice }) = found else {
        return match status {
            0x03 => "0x3: a hardware error; see the kernel's log, and reset the device".into(),
            0x05 => "0x5: the device is halted; reset it".into(),
            _ => format!("{status:#x}: no known status"),
        };
    };
    let sentences = facts.iter().chain(&advice).map(|sentence| sentence.trim_end_matches('.'));
    format!("{title}: {}", sentences.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_text_names_the_remedy() {
        assert_eq!(text(0), "0x0: success");
        assert!(text(0x8020_0000).contains("driver_name"));
        assert!(text(0x8011_0000).contains("sm_on"));
        // The command's result is in the bits above the error code.
        assert!(text(0x0000_0127).contains("max_batch_size"));
        assert!(text(0x05).contains("halted"));
        assert_eq!(text(0x8fff_0000), "0x8fff0000: no known status");
    }
}
