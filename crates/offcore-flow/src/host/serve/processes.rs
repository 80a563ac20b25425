//! The processes of an application.

use std::os::fd::OwnedFd;

use offcore_session::control::{Owner, PROCESSES, Processes};
use offcore_session::message::Question;
use offcore_stats::time::Time;

use super::descriptors::DescriptorCharge;

/// A process of an application.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) generation: u32,
    /// The process number in the kernel.
    pub(super) pid: i32,
    /// The process's socket, until the process closes it.
    pub(super) channel: Option<OwnedFd>,
    pub(super) charge: Option<DescriptorCharge>,
    /// A postponed request.
    pub(super) postponed: Option<Box<ReceivedRequest>>,
    /// The process is in the queue of processes that may have sent messages.
    pub(super) is_queued: bool,
    /// Readable after the process has ended; `None` if the kernel cannot report that.
    pub(super) pidfd: Option<OwnedFd>,
}

/// A request of a process.
#[derive(Debug)]
pub(super) struct ReceivedRequest {
    pub(super) question: Question,
    /// A descriptor that came with the request.
    pub(super) descriptor: Option<OwnedFd>,
    /// A descriptor could not be received.
    pub(super) lost: bool,
    /// When the request was received.
    pub(super) since: Time,
}

/// The living processes of an application by number. The application sees the same table in a shared page.
#[derive(Debug, Default)]
pub(super) struct ProcessTable {
    entries: Vec<Option<Process>>,
    living: usize,
}

impl ProcessTable {
    /// Number of living processes.
    pub(super) fn len(&self) -> usize {
        self.living
    }

    /// Adds a process and returns its number, or `None` if the application has the maximum number of processes.
    pub(super) fn add(&mut self, process: Process, page: &Processes) -> Option<(usize, Owner)> {
        let free = self.entries.iter().position(Option::is_none);
        let number = free.unwrap_or(self.entries.len());
        let owner = Owner::new(number, process.generation)
            .filter(|owner| owner.word() % (PROCESSES as u32) != Owner::STACK.word() % (PROCESSES as u32))?;
        page.set(number, process.generation);
        if number == self.entries.len() {
            self.entries.push(None);
        }
        self.entries[number] = Some(process);
        self.living += 1;
        Some((number, owner))
    }

    /// The process with this number and generation, if it is still alive.
    pub(super) fn get(&mut self, number: u32, generation: u32) -> Option<&mut Process> {
        let process = self.entries.get_mut(number as usize)?.as_mut();
        process.filter(|process| process.generation == generation)
    }

    /// Number and generation of the process with the kernel's process number `pid`.
    pub(super) fn find(&self, pid: i32) -> Option<(u32, u32)> {
        let mut entries = self.entries.iter().zip(0..);
        entries.find_map(|(process, number)| {
            let process = process.as_ref().filter(|process| process.pid == pid)?;
            Some((number, process.generation))
        })
    }

    /// Removes a process.
    pub(super) fn remove(&mut self, number: u32, page: &Processes) -> Option<Process> {
        let process = self.entries.get_mut(number as usize)?.take()?;
        page.set(number as usize, 0);
        self.living -= 1;
        Some(process)
    }

    /// Returns the watched descriptors of all processes.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = &OwnedFd> {
        self.entries.iter().flatten().flat_map(|process| process.channel.iter().chain(&process.pidfd))
    }

    /// The sockets of all processes.
    pub(super) fn channels(&self) -> impl Iterator<Item = &OwnedFd> {
        self.entries.iter().flatten().filter_map(|process| process.channel.as_ref())
    }
}
