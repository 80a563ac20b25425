//! Service integration: sd_notify(3), man pages, shell completions.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use sd_notify::NotifyState;

use crate::failure::Failure;

/// The connection to the service manager. Without one (NOTIFY_SOCKET), nothing is sent.
#[derive(Debug)]
pub(crate) struct Notifier {
    /// Interval of messages that this process is alive, if the manager expects them.
    interval: Option<Duration>,
    next: Instant,
}

impl Notifier {
    /// Reports that the process is ready.
    pub(crate) fn ready() -> Self {
        let _ = sd_notify::notify(&[NotifyState::Ready]);
        // Half of the limit, as sd_watchdog_enabled(3) recommends.
        let interval = sd_notify::watchdog_enabled().map(|limit| limit / 2);
        Self { interval, next: Instant::now() }
    }

    /// Reports that the process is alive. To be called often; it sends a message when one is due.
    pub(crate) fn alive(&mut self, now: Instant) {
        if let Some(interval) = self.interval
            && now >= self.next
        {
            self.next = now + interval;
            let _ = sd_notify::notify(&[NotifyState::Watchdog]);
        }
    }

    /// Reports that the process stops.
    pub(crate) fn stopping(&self) {
        let _ = sd_notify::notify(&[NotifyState::Stopping]);
    }
}

#[derive(Args, Debug)]
pub(crate) struct CompletionArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// Prints the completion script of a shell.
pub(crate) fn completions(args: &CompletionArgs, mut command: Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "offcore", &mut script);
    crate::output::write(&String::from_utf8_lossy(&script))?;
    Ok(())
}

#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// An existing directory
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
}

/// Writes a man page for each command into a directory.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<(), Failure> {
    let directory = args.directory.display();
    clap_mangen::generate_to(command, &args.directory)
        .with_context(|| format!("writing man pages to {directory}"))?;
    Ok(())
}
