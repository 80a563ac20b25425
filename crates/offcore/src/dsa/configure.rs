//! `offcore dsa configure`: checks, shows, saves or applies a layout.

use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::anyhow;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use offcore_dsa::WqMode;
use offcore_dsa::config::sysfs::{self, FileSystem, Roots, SysfsDevice};
use offcore_dsa::config::{
    ConfigError, DeviceCapabilities, DeviceConfig, OneLine, apply, built_in, check, commands, json, one_line,
    profile,
};

use super::ConfigureArgs;
use crate::failure::Failure;
use crate::output::{say, write};

pub(super) const EXAMPLES: &str = "\
Examples:
  Print accel-config's commands for the layout of the vhost guide:
    offcore dsa configure vhost --print

  Apply this layout to dsa1, after saving the current one to a file, as root:
    offcore dsa configure vhost -d dsa1 --save before.conf

  One dedicated work queue with four DSA engines, as by setup_dsa.sh:
    offcore dsa configure -d dsa0 -w 1 -m d -e 4

  Apply a file in accel-config's format:
    offcore dsa configure -c /etc/accel-config/accel-config.conf

  Print the current layout of all devices in this format, without changing it:
    offcore dsa configure --save -

  Disable a device:
    offcore dsa configure -d dsa0 --disable

A layout is checked against the rules of the specification before anything is
changed. If a step fails, the previous layout is restored.";

/// Parses `d`, `s` and the long names.
pub(super) fn mode() -> impl TypedValueParser<Value = WqMode> {
    PossibleValuesParser::new([
        PossibleValue::new("dedicated").alias("d"),
        PossibleValue::new("shared").alias("s"),
    ])
    .map(|word| if word.starts_with('d') { WqMode::Dedicated } else { WqMode::Shared })
}

/// Sources of layouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    BuiltIn(String),
    File,
    /// `-w`, `-m`, `-e`.
    OneLine,
    /// No layout: the device is disabled.
    Disable,
    /// No layout: the current one is saved.
    Present,
}

pub(super) fn sources(args: &ConfigureArgs) -> Result<Source, String> {
    match &args.layout {
        _ if args.file.is_some() => Ok(Source::File),
        Some(name) => Ok(Source::BuiltIn(name.clone())),
        None if args.wqs.is_some() => Ok(Source::OneLine),
        None if args.disable => Ok(Source::Disable),
        None if args.save.is_some() && !args.print => Ok(Source::Present),
        None => Err(
            "no layout: expected a built-in layout (vhost), a file with -c, or -w, -m and -e; --save alone writes the \
                     current layout, --disable disables the device"
                .into(),
        ),
    }
}

pub(super) fn run(args: &ConfigureArgs) -> Result<(), Failure> {
    let source = sources(args)?;
    let roots = args.roots.roots();
    // Errors in a layout are found before anything is written.
    let layouts = match source {
        Source::Present | Source::Disable => Vec::new(),
        _ => layouts(&source, args)?,
    };
    if let Some(path) = &args.save {
        save(&args.roots.devices(args.device.as_deref())?, path)?;
    }
    match source {
        Source::Present => {}
        Source::Disable => {
            let device = device(args, &roots)?;
            let done =
                apply::disable(&device, &roots, args.force, &mut FileSystem).map_err(anyhow::Error::from)?;
            say(&format!("{}: disabled ({} attributes written)", device.config.name, done.writes));
        }
        _ => {
            for (config, notes) in layouts {
                one(config, notes, args, &roots)?;
            }
        }
    }
    Ok(())
}

/// Writes the current layouts to a file, or to stdout.
fn save(devices: &[SysfsDevice], path: &Path) -> anyhow::Result<()> {
    let configs: Vec<DeviceConfig> = devices.iter().map(|device| device.config.clone()).collect();
    let text = json::write(&configs);
    if path == Path::new("-") {
        write(&text)?;
        return Ok(());
    }
    // An existing file may be the only copy of a layout.
    let written = std::fs::File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => {
            anyhow!("--save {}: it exists: expected a name that is not taken", path.display())
        }
        _ => anyhow!("--save {}: {error}", path.display()),
    })
}

fn device(args: &ConfigureArgs, roots: &Roots) -> anyhow::Result<SysfsDevice> {
    Ok(sysfs::find(roots, args.device.as_deref().unwrap_or("dsa0"))?)
}

/// Returns the layouts with their devices' names, and the ignored parts of a file.
fn layouts(source: &Source, args: &ConfigureArgs) -> anyhow::Result<Vec<(DeviceConfig, Vec<String>)>> {
    match (source, &args.file) {
        (_, Some(path)) => {
            let loaded = json::load(path)?;
            anyhow::ensure!(!loaded.devices.is_empty(), "{}: no DSA device in it", path.display());
            if let Some(name) = &args.device
                && let [one] = &loaded.devices[..]
            {
                return Ok(vec![(one.clone().renamed(name), loaded.ignored)]);
            }
            let wanted = |config: &DeviceConfig| args.device.as_ref().is_none_or(|name| *name == config.name);
            let mut configs: Vec<(DeviceConfig, Vec<String>)> =
                loaded.devices.into_iter().filter(wanted).map(|config| (config, Vec::new())).collect();
            let name = args.device.as_deref().unwrap_or_default();
            let first =
                configs.first_mut().ok_or_else(|| anyhow!("{}: no device {name} in it", path.display()))?;
            first.1 = loaded.ignored;
            Ok(configs)
        }
        (Source::BuiltIn(name), None) => {
            let config = profile(name)?;
            let config = match &args.device {
                Some(device) => config.renamed(device),
                None => config,
            };
            Ok(vec![(config, Vec::new())])
        }
        // The device's capabilities determine the rest: see `one`.
        _ => {
            let name = args.device.clone().unwrap_or_else(|| "dsa0".into());
            Ok(vec![(DeviceConfig { name, ..DeviceConfig::default() }, Vec::new())])
        }
    }
}

/// Adapts a layout to one device, checks it, and prints or applies it.
fn one(
    config: DeviceConfig,
    mut notes: Vec<String>,
    args: &ConfigureArgs,
    roots: &Roots,
) -> anyhow::Result<()> {
    let name = config.name.clone();
    let device = match sysfs::find(roots, &name) {
        // The commands for accel-config can be shown without a device.
        Err(ConfigError::NoDevice { .. }) if args.print => {
            notes.push(format!("{name}: not found; these are the commands for a first-generation device"));
            None
        }
        other => Some(other?),
    };
    let caps = device.as_ref().map_or_else(DeviceCapabilities::spr, |device| device.capabilities.clone());
    let mut config = on_device(config, args, &caps)?;
    notes.extend(config.fit(&caps));
    check(&config, &caps).map_err(ConfigError::Rules)?;
    notes.iter().for_each(|note| say(&format!("note: {note}")));
    if args.print {
        let mut lines = commands::commands(&config, &caps);
        if device.is_some_and(|device| device.state == "enabled") {
            lines.insert(0, commands::disable(&name));
        }
        write(&(lines.join("\n") + "\n"))?;
        return Ok(());
    }
    let Some(device) = device else { return Ok(()) };
    let done =
        apply::apply(&config, &device, roots, args.force, &mut FileSystem).map_err(ConfigError::from)?;
    done.notes.iter().for_each(|note| say(&format!("note: {note}")));
    let queues: Vec<String> = config.used_wqs().map(|(number, _)| config.wq_name(number)).collect();
    say(&format!("{name}: {} attributes written; enabled: {}", done.writes, queues.join(", ")));
    Ok(())
}

/// Adapts a built-in or one-line layout to a device with these capabilities.
fn on_device(
    config: DeviceConfig,
    args: &ConfigureArgs,
    caps: &DeviceCapabilities,
) -> Result<DeviceConfig, ConfigError> {
    if args.file.is_some() {
        return Ok(config);
    }
    match (&args.layout, args.wqs) {
        (Some(layout), _) => {
            Ok(built_in(layout, caps).map_or(config.clone(), |fit| fit.renamed(&config.name)))
        }
        (None, Some(wqs)) => {
            let mode = args.mode.unwrap_or_default();
            let engines = args.engines.unwrap_or(caps.engines);
            one_line(&OneLine { device: config.name, wqs, mode, engines }, caps)
        }
        (None, None) => Ok(config),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsa::DsaCommand;
    use crate::dsa::fixtures::Tree;
    use crate::dsa::tests::parse;

    fn configure(tree: &Tree, line: &str) -> Result<(), String> {
        let roots = tree.roots();
        let line =
            format!("configure --sysfs {} --dev {} {line}", roots.sysfs.display(), roots.dev.display());
        let DsaCommand::Configure(args) = parse(&line)? else { panic!("{line}") };
        run(&args).map_err(|failure| match failure {
            Failure::Usage(text) | Failure::File(text) => format!("usage: {text}"),
            Failure::Failed(error) | Failure::Program(_, error) => format!("{error}"),
        })
    }

    #[test]
    fn saved_configuration_loads_back() {
        let tree = Tree::healthy();
        let file = tree.file("saved.conf");
        configure(&tree, &format!("--save {}", file.display())).unwrap();
        let loaded = json::load(&file).unwrap();
        assert_eq!((loaded.ignored.len(), loaded.devices[0].wqs[1].size), (0, 64));
        configure(&tree, &format!("-c {} --print", file.display())).unwrap();
        // Neither a saved layout nor a layout in use is overwritten.
        let saved = std::fs::read(&file).unwrap();
        for layout in ["net --print".into(), format!("-c {} --print", file.display())] {
            let error = configure(&tree, &format!("{layout} --save {}", file.display())).unwrap_err();
            assert!(error.contains("it exists"), "{error}");
            assert_eq!(std::fs::read(&file).unwrap(), saved);
        }
        // Nothing is saved for a layout that does not exist.
        let new = tree.file("new.conf");
        configure(&tree, &format!("-c /nonexistent --save {}", new.display())).unwrap_err();
        assert!(!new.exists());
        for line in ["net --print", "-w 2 -m s -e 2 --print", "vhost -d dsa9 --print"] {
            configure(&tree, line).unwrap();
        }
        assert_eq!(sysfs::find(&tree.roots(), "dsa0").unwrap().config.wqs[1].size, 64);
    }

    #[test]
    fn impossible_layout_changes_nothing() {
        let tree = Tree::healthy();
        let bad = tree.file("bad.conf");
        let text = r#"[{"dev":"dsa0","groups":[{"dev":"group0.0","grouped_workqueues":[
            {"dev":"wq0.0","size":200,"name":"a","priority":0}],
            "grouped_engines":[{"dev":"engine0.0"}]}]}]"#;
        std::fs::write(&bad, text).unwrap();
        let file = format!("-c {}", bad.display());
        for (line, words) in [
            ("", &["usage", "no layout", "-c"][..]),
            ("--print", &["usage", "no layout"]),
            ("nothing", &["'nothing'", "vhost"]),
            ("vhost -d dsa3", &["dsa3", "found dsa0"]),
            ("-w 99", &["-w 99", "1 to 8"]),
            ("-w 1 -e 9", &["-e 9", "1 to 4"]),
            ("--disable -m s", &["--mode", "cannot be used with", "--disable"]),
            ("--disable -e 1", &["--engines", "cannot be used with", "--disable"]),
            (&file, &["2 rules", "total-wq-size", "at most 128", "wq-priority", "1 to 15"]),
            ("-c /no/file", &["/no/file"]),
        ] {
            let error = configure(&tree, line).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{line}: {error}");
        }
        assert_eq!(sysfs::find(&tree.roots(), "dsa0").unwrap().config.wqs[1].size, 64);
    }

    #[test]
    fn unchanged_queue_state_is_an_error() {
        let tree = Tree::healthy();
        // In this test nothing reacts to writes to bind and unbind.
        let error = configure(&tree, "vhost").unwrap_err();
        assert!(error.contains("wq0.0: its state is enabled, not disabled"), "{error}");
    }
}
