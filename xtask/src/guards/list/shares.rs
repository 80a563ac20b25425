//! The guards of the users' shares of a TCP stack: time, files, applications, ports, queues and memory.

use super::{FLOW, Guard, TCP};

/// The guards of users' shares.
#[rustfmt::skip]
pub(super) const SHARES: &[Guard] = &[
    Guard {
        name: "events of the kernel",
        file: "crates/offcore-flow/src/host/serve.rs",
        code: "                    self.woke_guest(user, from);\n                }\n                self.charge_time(user, from);\n",
        without: "                    self.woke_guest(user, from);\n                }\n",
        package: FLOW, executable: "--lib", test: "kernel_events_are_charged",
    },
    Guard {
        name: "processes that connect",
        file: "crates/offcore-flow/src/host/serve/attach.rs",
        code: "            self.charge_time(user, from);\n        }\n    }\n\n    /// Adds a guest.", without: "            let _ = from;\n        }\n    }\n\n    /// Adds a guest.",
        package: FLOW, executable: "--lib", test: "connecting_processes_are_charged",
    },
    Guard {
        name: "time for memory created by threads",
        file: "crates/offcore-flow/src/host/serve/attach.rs",
        code: "            self.charge_time(user, from);\n            if tsc::now()", without: "            let _ = from;\n            if tsc::now()",
        package: FLOW, executable: "--lib", test: "answers_of_threads_are_charged",
    },
    Guard {
        name: "slice for memory",
        file: "crates/offcore-flow/src/host/serve/attach.rs",
        code: "            if tsc::now() - began >= limit {\n                self.polling.look = true;\n                return;\n            }\n        }\n    }\n\n    /// Creates a new application", without: "            let _ = (began, limit);\n        }\n    }\n\n    /// Creates a new application",
        package: FLOW, executable: "--lib", test: "events_wait_for_next_slice",
    },
    Guard {
        name: "slice for first messages",
        file: "crates/offcore-flow/src/host/serve.rs",
        code: "if !self.schedule.turns.has_slice(user) {", without: "if user == u32::MAX {",
        package: FLOW, executable: "--lib", test: "first_messages_wait_for_next_slice",
    },
    Guard {
        name: "slice for kernel connections",
        file: "crates/offcore-flow/src/host/serve/listening.rs",
        code: "while self.schedule.turns.has_slice(user) {", without: "while user < u32::MAX {",
        package: FLOW, executable: "--lib", test: "accept_results_wait_for_next_slice",
    },
    Guard {
        name: "running threads of ended applications",
        file: "crates/offcore-flow/src/host/serve/listening.rs",
        code: "if same >= ENDING {", without: "if same >= ENDING * 100 {",
        package: FLOW, executable: "--lib", test: "ending_acceptors_are_limited",
    },
    Guard {
        name: "connections of a barred user",
        file: "crates/offcore-flow/src/host/serve/listening.rs",
        code: "SESSION) || self.schedule.waking.is_barred(user) {", without: "SESSION) {",
        package: FLOW, executable: "serve", test: "slow_wakeups_end_only_their_application",
    },
    Guard {
        name: "answers of threads",
        file: "crates/offcore-flow/src/host/serve/sessions.rs",
        code: "            self.charge_time(user, from);\n        }\n        self.polling.look = true;\n", without: "            let _ = from;\n        }\n        self.polling.look = true;\n",
        package: FLOW, executable: "--lib", test: "answers_of_threads_are_charged",
    },
    Guard {
        name: "relayed bytes",
        file: "crates/offcore-flow/src/host/serve.rs",
        code: "self.queue_pair_read(app, key.number);", without: "self.relay_next(app, key.number, key.generation, calls);",
        package: FLOW, executable: "--lib", test: "relayed_bytes_are_charged",
    },
    Guard {
        name: "announcements of a user",
        file: "crates/offcore-flow/src/host/serve/waking.rs",
        code: "if counts[at].1 >= ANNOUNCED && self", without: "if counts[at].1 >= ANNOUNCED << 32 && self",
        package: FLOW, executable: "--lib", test: "announcements_beside_other_users_are_limited",
    },
    Guard {
        name: "time of announcements",
        file: "crates/offcore-flow/src/host/serve/waking.rs",
        code: "self.schedule.turns.add(user, (now - from) * count / all.max(1), now);", without: "let _ = (user, (now - from) * count / all.max(1));",
        package: FLOW, executable: "--lib", test: "announcements_beside_other_users_are_limited",
    },
    Guard {
        name: "scans for marks",
        file: "crates/offcore-flow/src/host/serve/awake.rs",
        code: "self.charged = if self.charged + 1 < self.apps.len() { self.charged + 1 } else { 0 };", without: "",
        package: FLOW, executable: "--lib", test: "users_pay_for_scans_in_turn",
    },
    Guard {
        name: "threads of users",
        file: "crates/offcore-flow/src/host/serve/errands.rs",
        code: "self.users.entry(user)", without: "self.users.entry(user.min(1))",
        package: FLOW, executable: "--lib", test: "each_user_has_one_thread",
    },
    Guard {
        name: "waiting files of a user",
        file: "crates/offcore-flow/src/host/serve/attach.rs",
        code: "self.helpers.errands.count(user) >= MOST_ERRANDS)", without: "self.helpers.errands.count(user) >= MOST_ERRANDS << 8)",
        package: FLOW, executable: "--lib", test: "waiting_files_of_a_user_are_limited",
    },
    Guard {
        name: "messages of a blocked user",
        file: "crates/offcore-flow/src/host/serve/calls.rs",
        code: "if self.helpers.errands.are_full(user) {", without: "if self.helpers.errands.are_full(user) && user == u32::MAX {",
        package: FLOW, executable: "--lib", test: "waiting_files_of_a_user_are_limited",
    },
    Guard {
        name: "processes that wait for memory",
        file: "crates/offcore-flow/src/host/serve/attach.rs",
        code: " || all >= WAITING {", without: " || all >= WAITING << 8 {",
        package: FLOW, executable: "--lib", test: "processes_that_wait_for_memory_are_limited",
    },
    Guard {
        name: "descriptors in unread answers",
        file: "crates/offcore-flow/src/host/serve/attach.rs",
        code: "const CHANNEL_BUFFER: usize = 1;", without: "const CHANNEL_BUFFER: usize = 1 << 20;",
        package: FLOW, executable: "--lib", test: "unread_answers_are_limited",
    },
    Guard {
        name: "applications of all users",
        file: "crates/offcore-flow/src/host/serve/owners.rs",
        code: "(unused < APPLICATIONS).then_some(unused)", without: "(unused < 2 * APPLICATIONS).then_some(unused)",
        package: FLOW, executable: "--lib", test: "applications_of_all_users_are_limited",
    },
    Guard {
        name: "cap on a user's applications",
        file: "crates/offcore-flow/src/host/serve/feed.rs",
        code: "(APPLICATIONS / users).clamp(1, APPLICATIONS_OF_USER)", without: "(APPLICATIONS / users).max(1)",
        package: FLOW, executable: "--lib", test: "applications_per_user_are_capped",
    },
    Guard {
        name: "ports of a user",
        file: "crates/offcore-flow/src/host/serve/addresses.rs",
        code: "if has >= OF_USER || here", without: "if has >= OF_USER << 16 || here",
        package: FLOW, executable: "--lib", test: "ports_of_a_user_are_limited",
    },
    Guard {
        name: "half-open connections of a listener",
        file: "crates/offcore-tcp/src/proto/listeners.rs",
        code: "listener.half_open < listener.backlog && user", without: "listener.half_open < listener.backlog << 4 && user",
        package: TCP, executable: "stack", test: "listener_queues_are_bounded",
    },
    Guard {
        name: "connections to accept",
        file: "crates/offcore-tcp/src/proto/opening.rs",
        code: "        if listener.accept.len() >= listener.backlog {\n            // The peer", without: "        if listener.accept.len() >= listener.backlog << 4 {\n            // The peer",
        package: TCP, executable: "stack", test: "listener_queues_are_bounded",
    },
    Guard {
        name: "cookies beside a full queue",
        file: "crates/offcore-tcp/src/proto/opening/cookies.rs",
        code: "this.accept.len() >= this.backlog)", without: "this.accept.len() >= this.backlog << 4)",
        package: TCP, executable: "stack", test: "listener_queues_are_bounded",
    },
    Guard {
        name: "segments below holes",
        file: "crates/offcore-tcp/src/proto/input.rs",
        code: "|| memory::allows_speculative_use(arena);", without: "|| memory::allows_speculative_use(arena) || len > 0;",
        package: TCP, executable: "stack", test: "segments_below_holes_have_priority",
    },
    Guard {
        name: "timers of a call",
        file: "crates/offcore-tcp/src/proto/stack/timers.rs",
        code: "const EXPIRIES: usize = 64;", without: "const EXPIRIES: usize = 256;",
        package: TCP, executable: "stack", test: "timers_of_a_call_are_limited",
    },
];
