//! The EAL's arguments: the user's arguments, and defaults for the others.

use offcore_stats::lcore;

use super::EalError;

/// A PCI address that no device has. If it is the only allowed device, the EAL probes no devices by itself, but devices
/// can still be probed one by one.
const NO_DEVICE: &str = "ffff:ff:1f.7";
/// Minimum of free hugepages in MiB that the EAL needs; with less it runs without hugepages.
const MIN_HUGEPAGE_MIB: u64 = 64;

/// The facts on which the defaults depend.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    /// Free hugepages in MiB.
    pub(super) free_huge_mib: u64,
    /// The first lcore that this process may use.
    pub(super) lcore: usize,
    pub(super) pid: u32,
}

impl Machine {
    pub(super) fn here() -> Self {
        let lcore = lcore::available().ok().and_then(|all| all.first().copied()).unwrap_or(0);
        Self { free_huge_mib: free_hugepage_mib(), lcore, pid: std::process::id() }
    }
}

/// Returns the free hugepages of all sizes in MiB.
fn free_hugepage_mib() -> u64 {
    let Ok(sizes) = std::fs::read_dir("/sys/kernel/mm/hugepages") else { return 0 };
    let kib = sizes.flatten().filter_map(|size| {
        let name = size.file_name();
        let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let free: u64 =
            std::fs::read_to_string(size.path().join("free_hugepages")).ok()?.trim().parse().ok()?;
        Some(kib * free)
    });
    kib.sum::<u64>() / 1024
}

/// Splits `text` into words. A quoted part belongs to one word.
pub(super) fn split(text: &str) -> Result<Vec<String>, EalError> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in text.chars() {
        match quote {
            Some(q) if c == q => quote = None,
            None if c == '\'' || c == '"' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    if let Some(quote) = quote {
        let expected = format!("expected another {quote}: one is open at the end");
        return Err(EalError::Arguments { found: text.into(), expected });
    }
    words.extend(word);
    Ok(words)
}

/// Rejects arguments that are unsuitable for a process with other threads.
pub(super) fn check(words: &[String], text: &str) -> Result<(), EalError> {
    let refused = |expected: &str| {
        Err(EalError::Arguments { found: text.into(), expected: format!("expected {expected}") })
    };
    for (at, word) in words.iter().enumerate() {
        let value = word.strip_prefix("--proc-type=").or_else(|| match word.as_str() {
            "--proc-type" => words.get(at + 1).map(String::as_str),
            _ => None,
        });
        match word.as_str() {
            "-h" | "--help" => {
                return refused("no --help, which ends the process: dpdk-testpmd --help shows it");
            }
            "--" => return refused("no '--': all of it is for the EAL"),
            _ if value.is_some_and(|kind| kind != "primary") => {
                return refused("no --proc-type but primary: the packet buffers are this process's own");
            }
            word if at == 0 && !word.starts_with('-') => return refused("options, which begin with '-'"),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the user's arguments, followed by defaults for missing ones.
pub(super) fn complete(mut words: Vec<String>, machine: &Machine) -> Vec<String> {
    let said = words.clone();
    let has = |options: &[&str]| {
        said.iter().any(|word| {
            options.iter().any(|option| match option.strip_prefix("--") {
                Some(_) => {
                    word.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
                }
                None => word.starts_with(option) && !word.starts_with("--"),
            })
        })
    };
    let mut unless = |options: &[&str], default: String| {
        if !has(options) {
            words.push(default);
        }
    };
    unless(&["-c", "-l", "-s", "-S", "--lcores"], format!("--lcores=0@{}", machine.lcore));
    unless(&["--iova-mode"], "--iova-mode=va".into());
    unless(&["--telemetry", "--no-telemetry"], "--no-telemetry".into());
    unless(&["--file-prefix", "--no-shconf"], format!("--file-prefix=offcore-{}", machine.pid));
    unless(&["-a", "--allow", "-w", "-b", "--block", "--no-pci"], format!("--allow={NO_DEVICE}"));
    let own = has(&["--in-memory", "--huge-dir", "--legacy-mem", "--socket-mem", "--huge-unlink"]);
    let huge = !has(&["--no-huge"]) && (own || machine.free_huge_mib >= MIN_HUGEPAGE_MIB);
    if huge && !own {
        words.push("--in-memory".into());
    } else if !huge {
        // These options cannot be combined with --in-memory.
        for (options, default) in [(["--no-huge", "--no-huge"], "--no-huge"), (["-m", "-m"], "-m128")] {
            if !has(&options) {
                words.push(default.into());
            }
        }
    }
    if !has(&["--in-memory", "--no-shconf"]) && !words.iter().any(|word| word == "--in-memory") {
        words.push("--no-shconf".into());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Machine = Machine { free_huge_mib: 4096, lcore: 3, pid: 7 };

    fn words(text: &str) -> Vec<String> {
        split(text).unwrap()
    }

    #[test]
    fn words_split_outside_quotes() {
        assert_eq!(
            words("  -m 64 --vdev='net_ring0,a=b c'  \"\" "),
            ["-m", "64", "--vdev=net_ring0,a=b c", ""]
        );
        assert!(words("").is_empty());
        assert!(split("--vdev 'net").unwrap_err().to_string().contains("is open at the end"));
    }

    #[test]
    fn given_arguments_override_defaults() {
        let defaults = complete(Vec::new(), &MACHINE);
        let expected = [
            "--lcores=0@3",
            "--iova-mode=va",
            "--no-telemetry",
            "--file-prefix=offcore-7",
            "--allow=ffff:ff:1f.7",
            "--in-memory",
        ];
        assert_eq!(defaults, expected);
        let all = "-l 0-1 --iova-mode=pa --telemetry --file-prefix x -a 0000:01:00.0 --in-memory";
        assert_eq!(complete(words(all), &MACHINE), words(all));
        let without = complete(Vec::new(), &Machine { free_huge_mib: 0, ..MACHINE });
        assert!(without.ends_with(&words("--no-huge -m128 --no-shconf")), "{without:?}");
        let without = complete(words("--no-huge -m 256"), &MACHINE);
        assert!(
            !without.contains(&"-m128".into()) && !without.contains(&"--in-memory".into()),
            "{without:?}"
        );
    }

    #[test]
    fn process_ending_arguments_are_refused() {
        for (text, expected) in [
            ("--help", "ends the process"),
            ("-m 64 -h", "ends the process"),
            ("--proc-type=secondary", "primary"),
            ("--proc-type auto", "primary"),
            ("net_null0", "begin with '-'"),
            ("-m 64 -- -i", "for the EAL"),
        ] {
            let error = check(&words(text), text).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(text), "{text}: {error}");
        }
        assert!(check(&words("--proc-type=primary --vdev net_null0"), "").is_ok());
    }
}
