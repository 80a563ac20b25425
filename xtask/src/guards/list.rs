//! The guards, grouped by the party that each of them protects against. docs/threats.md refers to them by name.

mod shares;

use super::Guard;

const VHOST: &str = "offcore-vhost";
const RING: &str = "offcore-ring";
const PORT: &str = "offcore-port";
const FLOW: &str = "offcore-flow";
const TCP: &str = "offcore-tcp";
const SESSION: &str = "offcore-session";

/// Returns all guards.
pub(super) fn all() -> impl Iterator<Item = &'static Guard> {
    LIST.iter().chain(shares::SHARES)
}

/// Guards other than those in `shares`.
#[rustfmt::skip]
const LIST: &[Guard] = &[
    // ---- front ends: memory ----
    Guard {
        name: "memory of a port",
        file: "crates/offcore-vhost/src/backend/memory.rs",
        code: "if found > most {", without: "if found > most && most == 0 {",
        package: VHOST, executable: "control", test: "guest_memory_per_port_is_limited",
    },
    Guard {
        name: "memory beside a guest's",
        file: "crates/offcore-vhost/src/backend/memory.rs",
        code: "if found > MAX_NON_GUEST {", without: "if found > u64::MAX >> 1 {",
        package: VHOST, executable: "control", test: "guest_memory_per_port_is_limited",
    },
    Guard {
        name: "file systems",
        file: "crates/offcore-vhost/src/backend/memory.rs",
        code: "if !FILE_SYSTEMS.contains(&stat.f_type) {", without: "if FILE_SYSTEMS.is_empty() {",
        package: VHOST, executable: "--lib", test: "memory_on_unknown_file_systems_is_refused",
    },
    Guard {
        name: "memory that vanishes",
        file: "crates/offcore-mem/src/sigbus.rs",
        code: "address.wrapping_sub(*start) < *len", without: "address == 1 && *start < *len",
        package: "offcore-mem", executable: "--lib", test: "truncated_file_reads_as_zeroes",
    },
    Guard {
        name: "whole mappings",
        file: "crates/offcore-mem/src/sigbus.rs",
        code: "                start as *mut libc::c_void,\n                len,",
        without: "                (address / 4096 * 4096) as *mut libc::c_void,\n                4096,",
        package: "offcore-mem", executable: "--lib", test: "truncated_pages_share_one_mapping",
    },
    Guard {
        name: "virtqueues of vanished memory",
        file: "crates/offcore-vhost/src/vring.rs",
        code: "if sigbus::vanished() != self.vanished {", without: "if sigbus::vanished() == usize::MAX {",
        package: VHOST, executable: "hostile_guest", test: "vanish",
    },
    Guard {
        name: "memory under copies",
        file: "crates/offcore-vhost/src/vring.rs",
        code: "        self.memory.set_in_flight(in_flight);\n", without: "",
        package: VHOST, executable: "figures", test: "memory_outlives_unanswered_copies",
    },
    Guard {
        name: "stops under copies",
        file: "crates/offcore-vhost/src/vring.rs",
        code: "if self.in_flight(mover) > 0 || self.lent > 0 {", without: "if self.in_flight(mover) == usize::MAX {",
        package: VHOST, executable: "figures", test: "stop_waits_for_inflight_copies",
    },
    Guard {
        name: "packets of the last front end",
        file: "crates/offcore-vhost/src/dequeue.rs",
        code: " || dequeued.packets > 0 && self.vring.is_changing() {", without: " {",
        package: VHOST, executable: "figures", test: "packets_are_delivered_before_stop_completes",
    },
    // ---- front ends: messages ----
    Guard {
        name: "rate of messages",
        file: "crates/offcore-vhost/src/backend/control.rs",
        code: "let pause = self.messages.pause(Instant::now());", without: "let pause = Duration::ZERO;",
        package: VHOST, executable: "control", test: "messages_are_rate_limited",
    },
    Guard {
        name: "number of a virtqueue",
        file: "crates/offcore-vhost/src/backend/session/rings.rs",
        code: "usize::try_from(index).ok().and_then(|index|", without: "Some(index as u16 as usize).and_then(|index|",
        package: VHOST, executable: "hostile_guest", test: "cve_2020_10723_index_of_32_bits",
    },
    Guard {
        name: "descriptors of a message",
        file: "crates/offcore-vhost/src/message/body.rs",
        code: "if self.fds.len() != fds {", without: "if self.fds.len() < fds {",
        package: VHOST, executable: "control", test: "wrong_fd_counts_are_refused",
    },
    Guard {
        name: "eventfds only",
        file: "crates/offcore-vhost/src/backend/ring.rs",
        code: "found == EVENTFD && non_blocking()", without: "non_blocking()",
        package: VHOST, executable: "control", test: "only_eventfds_are_accepted",
    },
    Guard {
        name: "signals that do not wait",
        file: "crates/offcore-vhost/src/eventfd.rs",
        code: "let _ = signaller.signal(event);",
        without: "let _ = (signaller, rustix::io::write(event, &1u64.to_ne_bytes()));",
        package: VHOST, executable: "--lib", test: "full_eventfd_does_not_block",
    },
    Guard {
        name: "length of the log",
        file: "crates/offcore-vhost/src/backend/session/log.rs",
        code: "if expected > log.end() {", without: "if expected > log.end() && expected == 0 {",
        package: VHOST, executable: "control", test: "rings_wait_for_dirty_log",
    },
    Guard {
        name: "logging once nothing is in flight",
        file: "crates/offcore-vhost/src/vring.rs",
        code: "if self.in_flight(mover) > 0 || self.lent > 0 {", without: "if self.lent > 0 {",
        package: VHOST, executable: "--lib", test: "logging_waits_for_inflight_copies",
    },
    Guard {
        name: "marks after copies",
        file: "crates/offcore-vhost/src/vring.rs",
        code: "            logging.complete(packets);\n", without: "",
        package: VHOST, executable: "control", test: "guest_migrates_with_copies_under_way",
    },
    Guard {
        name: "virtqueues in flight",
        file: "crates/offcore-vhost/src/backend/session/inflight.rs",
        code: "if !(1..=vrings).contains(&queues.into())", without: "if !(1..=256).contains(&queues)",
        package: VHOST, executable: "control", test: "out_of_range_inflight_area_is_refused",
    },
    Guard {
        name: "length in flight",
        file: "crates/offcore-vhost/src/backend/session/inflight.rs",
        code: "if area.size < len as u64 ||", without: "if",
        package: VHOST, executable: "control", test: "invalid_inflight_region_is_refused",
    },
    Guard {
        name: "records of copies in flight",
        file: "crates/offcore-ring/src/packed/device.rs",
        code: "                inflight.keep(self.next.after(ahead, size).index(size), entry.word.0);\n", without: "                let _ = (inflight, entry, size);\n",
        package: RING, executable: "--lib", test: "inflight_chains_are_recovered_after_crash",
    },
    Guard {
        name: "addresses after a stop",
        file: "crates/offcore-vhost/src/backend/session/rings.rs",
        code: "        ring.reset();\n        let base", without: "        let base",
        package: VHOST, executable: "hostile_guest", test: "fix_1846fe767f_addresses_after_stop",
    },
    // ---- guests: descriptors ----
    Guard {
        name: "ranges of buffers",
        file: "crates/offcore-mem/src/guest.rs",
        code: "(u64::from(len) <= room).then_some(host)", without: "(u64::from(len) <= room.max(u64::MAX)).then_some(host)",
        package: "offcore-mem", executable: "--lib", test: "whole_ranges_are_checked",
    },
    Guard {
        name: "index of a split ring",
        file: "crates/offcore-ring/src/split/device.rs",
        code: "if found.wrapping_sub(self.avail_idx) > room {", without: "if found.wrapping_sub(self.avail_idx) > room && room > self.layout.size {",
        package: VHOST, executable: "hostile_guest", test: "cve_2020_14378",
    },
    Guard {
        name: "next of a descriptor",
        file: "crates/offcore-ring/src/split/device.rs",
        code: "if u32::from(desc.next) >= size {", without: "if u32::from(desc.next) >= size + 4096 {",
        package: RING, executable: "--lib", test: "split::tests",
    },
    Guard {
        name: "length of an indirect table",
        file: "crates/offcore-ring/src/split/device.rs",
        code: "            || !desc.len.is_multiple_of(16)\n", without: "",
        package: VHOST, executable: "hostile_guest", test: "cve_2018_1059_indirect_tables",
    },
    Guard {
        name: "shortest packet",
        file: "crates/offcore-vhost/src/dequeue/gather.rs",
        code: "if total < SHORTEST {", without: "if total < NET_HEADER {",
        package: VHOST, executable: "hostile_guest", test: "cve_2022_2132",
    },
    Guard {
        name: "range of a checksum",
        file: "crates/offcore-wire/src/virtio_net.rs",
        code: "        if self.needs_checksum() {\n            ChecksumRangeError", without: "        if self.needs_checksum() && frame_len == 0 {\n            ChecksumRangeError",
        package: VHOST, executable: "hostile_guest", test: "cve_2024_11614_checksum_beyond_packet",
    },
    Guard {
        name: "segments of 0 bytes",
        file: "crates/offcore-wire/src/virtio_net.rs",
        code: "if self.gso_size == 0 {", without: "if self.gso_size == 0 && frame_len == 0 {",
        package: VHOST, executable: "hostile_guest", test: "fix_7023f3e532_segments_of_0_bytes",
    },
    // ---- guests: the worker's time ----
    Guard {
        name: "work of a round",
        file: "crates/offcore-vhost/src/dequeue/backlog.rs",
        code: "let mut left = WORK;", without: "let mut left = usize::MAX;",
        package: VHOST, executable: "amplification", test: "segments_of_a_call_are_bounded",
    },
    Guard {
        name: "segments of a packet",
        file: "crates/offcore-port/src/offload_fallback.rs",
        code: " || segmenter.segments().count() > SEGMENTS {", without: " || segmenter.segments().count() > SEGMENTS << 16 {",
        package: PORT, executable: "offload_fallback", test: "a_packet_becomes_256_segments_at_most",
    },
    Guard {
        name: "descriptors of a round",
        file: "crates/offcore-vhost/src/room.rs",
        code: "self.descriptors == 0 || self.bytes == 0", without: "self.descriptors > DESCRIPTORS",
        package: VHOST, executable: "amplification", test: "descriptors_of_a_call_are_bounded",
    },
    Guard {
        name: "chains without room",
        file: "crates/offcore-vhost/src/room.rs",
        code: "self.0.filter(|(room, _)| bytes > *room)", without: "self.0.filter(|(room, _)| bytes > *room && bytes == 0)",
        package: VHOST, executable: "amplification", test: "chains_without_room_are_read_once",
    },
    Guard {
        name: "no line from a worker",
        file: "crates/offcore-vhost/src/vring.rs",
        code: "        self.report.broken = Some(error);\n        self.cell.report_broken",
        without: "        tracing::warn!(%error, \"broken\");\n        self.report.broken = Some(error);\n        self.cell.report_broken",
        package: VHOST, executable: "limits", test: "workers_log_nothing",
    },
    // ---- stations ----
    Guard {
        name: "tag behind the tag",
        file: "crates/offcore-flow/src/bridge/tag.rs",
        code: "        return Err(TagError::Inner);\n", without: "",
        package: FLOW, executable: "--lib", test: "vlans_do_not_mix",
    },
    Guard {
        name: "checksum in the header",
        file: "crates/offcore-wire/src/virtio_net.rs",
        code: "if usize::from(self.csum_start) < ethernet::HEADER_LEN {", without: "if self.csum_start == u16::MAX {",
        package: "offcore-wire", executable: "--lib", test: "invalid_headers_are_rejected",
    },
    Guard {
        name: "checksum in the tag",
        file: "crates/offcore-flow/src/bridge/tag.rs",
        code: "usize::from(asked.csum_start) < BEHIND_TAG)", without: "usize::from(asked.csum_start) == usize::MAX)",
        package: FLOW, executable: "hostile_bridge", test: "any_frame_stays_in_its_vlan",
    },
    Guard {
        name: "addresses of a port",
        file: "crates/offcore-flow/src/bridge/fdb.rs",
        code: "if is_beyond && !self.take_beyond() {", without: "if is_beyond && !self.take_beyond() && self.own == 0 {",
        package: FLOW, executable: "--lib", test: "port_keeps_to_its_fdb_share",
    },
    Guard {
        name: "addresses that are a port's",
        file: "crates/offcore-flow/src/bridge.rs",
        code: "if !stations.admit(port, owner) {", without: "if !stations.admit(port, owner) && port > 63 {",
        package: FLOW, executable: "--lib", test: "pinned_address_cannot_be_claimed",
    },
    // ---- servers and routers of a link ----
    Guard {
        name: "server of a lease",
        file: "crates/offcore-tcp/src/proto/dhcp.rs",
        code: ".filter(|lease| reply.server == Some(lease.server))", without: "",
        package: TCP, executable: "network", test: "dhcpnak_of_other_server_is_ignored",
    },
    Guard {
        name: "shortest lease",
        file: "crates/offcore-tcp/src/proto/lease.rs",
        code: ".max(SHORTEST_LEASE)", without: ".max(SHORTEST_LEASE / 1_000)",
        package: TCP, executable: "network", test: "zero_lease_time_is_rate_limited",
    },
    Guard {
        name: "advertisements from afar",
        file: "crates/offcore-tcp/src/proto/routers.rs",
        code: "if ip.hops != 255 || !router.is_unicast_link_local() {", without: "if ip.hops == 0 {",
        package: TCP, executable: "network", test: "invalid_router_advertisements_are_dropped",
    },
    Guard {
        name: "advertisements of a second",
        file: "crates/offcore-tcp/src/proto/autoconf.rs",
        code: "*count <= ADVERTS", without: "*count <= ADVERTS.max(u8::MAX)",
        package: TCP, executable: "network", test: "advertisement_flood_is_bounded",
    },
    Guard {
        name: "addresses of advertisements",
        file: "crates/offcore-tcp/src/proto/routers.rs",
        code: "own.count() < ADDRESSES", without: "own.count() < ADDRESSES * 100",
        package: TCP, executable: "network", test: "advertisement_flood_is_bounded",
    },
    // ---- programs on the TCP stack ----
    Guard {
        name: "turns of users",
        file: "crates/offcore-flow/src/host/serve/turns.rs",
        code: "min_by_key(|account| account.used.max(least))", without: "min_by_key(|account| account.used / u64::MAX)",
        package: FLOW, executable: "--lib", test: "users_share_time_equally",
    },
    Guard {
        name: "turns of users that send",
        file: "crates/offcore-tcp/src/proto/users.rs",
        code: "if self.sending < 2 {", without: "if self.sending < u64::MAX {",
        package: TCP, executable: "stack", test: "users_send_in_turn",
    },
    Guard {
        name: "windows of users",
        file: "crates/offcore-tcp/src/proto/stack/window_shares.rs",
        code: "if users.charge_received(conn.user, bytes, packets) {",
        without: "if users.charge_received(conn.user, bytes, packets) && id.index == u32::MAX {",
        package: TCP, executable: "stack", test: "busy_worker_limits_windows",
    },
    Guard {
        name: "datagrams of users",
        file: "crates/offcore-tcp/src/proto/udp.rs",
        code: "if !arenas.users.datagram_received(socket.user, header.len.into()) {",
        without: "if !arenas.users.datagram_received(socket.user, header.len.into()) && header.len == u16::MAX {",
        package: TCP, executable: "datagrams", test: "busy_worker_drops_datagrams_above_share",
    },
    Guard {
        name: "marks of a call",
        file: "crates/offcore-session/src/control.rs",
        code: "taken += usize::from(bits == 0);", without: "taken += usize::from(bits == 0 && most == 0);",
        package: SESSION, executable: "--lib", test: "false_summary_bits_end_scan",
    },
    Guard {
        name: "memory of a user",
        file: "crates/offcore-session/src/arena.rs",
        code: "self.beyond_budget() + self.kept(share)", without: "self.beyond_budget() / usize::MAX + self.kept(share)",
        package: SESSION, executable: "--lib", test: "arenas_share_a_budget",
    },
    Guard {
        name: "lists of a segment",
        file: "crates/offcore-session/src/arena.rs",
        code: " || !self.charge.take(private_blocks(segment.len))", without: "",
        package: SESSION, executable: "--lib", test: "lists_of_segments_are_charged",
    },
    Guard {
        name: "descriptors of a user",
        file: "crates/offcore-flow/src/host/serve/descriptors.rs",
        code: "if !self.has_room(user, count) {", without: "if !self.has_room(user, count / usize::MAX) {",
        package: FLOW, executable: "--lib", test: "users_have_equal_shares",
    },
    Guard {
        name: "descriptors of a kernel listener",
        file: "crates/offcore-flow/src/host/serve/listening.rs",
        code: "descriptors.take(user, KERNEL_LISTENER)", without: "descriptors.take(user, KERNEL_LISTENER / 18)",
        package: FLOW, executable: "serve", test: "kernel_listener_charges_connections",
    },
    Guard {
        name: "descriptors behind an out-of-band byte",
        file: "crates/offcore-flow/src/host/serve/pair.rs",
        code: "is_ok_and(|found| found == (there, false))", without: "is_ok_and(|found| !found.1)",
        package: FLOW, executable: "--lib", test: "queued_descriptors_prevent_plain_close",
    },
    Guard {
        name: "lock word of the stack",
        file: "crates/offcore-flow/src/host/serve/raw.rs",
        code: "*holder != Owner::STACK", without: "holder.word() > 0",
        package: FLOW, executable: "--lib", test: "only_dead_owner_loses_lock",
    },
    Guard {
        name: "sessions before accept",
        file: "crates/offcore-flow/src/host/serve/calls.rs",
        code: "backlog.min(MAX_UNACCEPTED_SESSIONS)", without: "backlog.min(MAX_UNACCEPTED_SESSIONS * 1000)",
        package: FLOW, executable: "serve", test: "unaccepted_connections_have_no_sessions",
    },
    Guard {
        name: "kernel connections of a blocked user",
        file: "crates/offcore-flow/src/host/serve/listening.rs",
        code: "Some(AcceptResult::Done) if self.is_full(app) => {",
        without: "Some(AcceptResult::Done) if self.is_full(app) && app > usize::MAX / 2 => {",
        package: FLOW, executable: "serve", test: "blocked_user_gets_few_kernel_connections",
    },
    Guard {
        name: "events of a user",
        file: "crates/offcore-flow/src/host/serve/turns.rs",
        code: "if self.competes(user) {", without: "if self.competes(user) && self.slice == 0 {",
        package: FLOW, executable: "--lib", test: "events_beside_other_users_get_a_slice",
    },
    Guard {
        name: "applications of a user",
        file: "crates/offcore-flow/src/host/serve/attach.rs",
        code: "if !self.helpers.feed.has_room(user) {", without: "if !self.helpers.feed.has_room(user) && user > u32::MAX / 2 {",
        package: FLOW, executable: "serve", test: "applications_of_a_user_are_limited",
    },
    Guard {
        name: "listeners of a port",
        file: "crates/offcore-flow/src/host/serve/addresses.rs",
        code: "here.nth(AT_PORT - 1)", without: "here.nth(AT_PORT * 100)",
        package: FLOW, executable: "serve", test: "listeners_at_a_port_are_limited",
    },
    Guard {
        name: "half-open connections of a user",
        file: "crates/offcore-tcp/src/proto/listeners.rs",
        code: "user.half_open < HALVES / self.users.len()",
        without: "self.users.values().map(|user| user.half_open).sum::<usize>() < HALVES",
        package: TCP, executable: "stack", test: "users_share_half_open_connections",
    },
    Guard {
        name: "connections reset at once",
        file: "crates/offcore-tcp/src/proto/apps.rs",
        code: "const MAX_ABORTS_PER_CALL: usize = 256;", without: "const MAX_ABORTS_PER_CALL: usize = 1 << 14;",
        package: TCP, executable: "stack", test: "abort_removed_is_bounded",
    },
    Guard {
        name: "private memory of a user",
        file: "crates/offcore-tcp/src/proto/arenas.rs",
        code: "if this.users == this.paid && this.charge.take(1) {", without: "if this.users == this.paid {",
        package: TCP, executable: "stack", test: "budget_limits_connections",
    },
    Guard {
        name: "connections of a user",
        file: "crates/offcore-tcp/src/proto/users.rs",
        code: "entries < self.most / (users + usize::from(entries == 0))", without: "entries < self.most * (users + usize::from(entries == 0))",
        package: TCP, executable: "stack", test: "users_share_connections",
    },
    Guard {
        name: "runs of single bytes",
        file: "crates/offcore-tcp/src/proto/recovery/runs.rs",
        code: ".clamp(FEW, MOST - RESERVED)", without: ".max(MOST - RESERVED)",
        package: TCP, executable: "--lib", test: "single_bytes_use_few_runs",
    },
    Guard {
        name: "queue of a listener",
        file: "crates/offcore-tcp/src/proto/calls.rs",
        code: "backlog.clamp(1, BACKLOG)", without: "backlog.clamp(1, BACKLOG * 16)",
        package: TCP, executable: "stack", test: "listener_info_reports_state",
    },
    Guard {
        name: "groups of a user",
        file: "crates/offcore-tcp/src/proto/memberships.rs",
        code: "count >= OF_USER.min(MAX_JOINS / users)", without: "count >= OF_USER.max(MAX_JOINS / users)",
        package: TCP, executable: "network", test: "group_memberships_are_limited",
    },
    Guard {
        name: "two hours of an address",
        file: "crates/offcore-tcp/src/proto/routers.rs",
        code: "if given > two_hours || given > valid {", without: "if given > 0 && two_hours > 0 {",
        package: TCP, executable: "network", test: "valid_lifetime_obeys_two_hour_rule",
    },
    // ---- back ends and connecting users ----
    Guard {
        name: "user of a back end",
        file: "crates/offcore-vhost/src/frontend.rs",
        code: "match [0, own].contains(&found) ||", without: "match found != u32::MAX ||",
        package: VHOST, executable: "control", test: "back_end_of_other_user_is_refused",
    },
    Guard {
        name: "chains that a back end returns",
        file: "crates/offcore-ring/src/split/driver.rs",
        code: "if ready > self.in_flight() {", without: "if ready > self.layout.size {",
        package: RING, executable: "--lib", test: "split::",
    },
    Guard {
        name: "buffers of a packet",
        file: "crates/offcore-port/src/virtio_user/rx.rs",
        code: "if header.num_buffers == 0 || header.num_buffers > ring.driver.size() {", without: "if header.num_buffers == 0 {",
        package: PORT, executable: "virtio_user", test: "impossible_headers_are_counted",
    },
    Guard {
        name: "memory of a region in flight",
        file: "crates/offcore-vhost/src/backend/session/inflight.rs",
        code: "        self.device.keep_inflight(kept);\n", without: "        let _ = kept;\n",
        package: VHOST, executable: "control", test: "inflight_regions_do_not_accumulate",
    },
    Guard {
        name: "regions of a connection",
        file: "crates/offcore-vhost/src/backend/session/inflight.rs",
        code: "if self.regions == REGIONS {", without: "if self.regions == usize::MAX {",
        package: VHOST, executable: "control", test: "inflight_regions_per_connection_are_limited",
    },
    Guard {
        name: "pieces of a message",
        file: "crates/offcore-vhost/src/connection.rs",
        code: "if fds.len() > MAX_FDS {", without: "if fds.len() > PASSED * HEADER {",
        package: VHOST, executable: "--lib", test: "too_many_descriptors_end_the_connection",
    },
    Guard {
        name: "addresses in flight",
        file: "crates/offcore-ring/src/packed/device.rs",
        code: "let level = if self.inflight.is_some() { Level::Plain } else { self.level };", without: "let level = self.level;",
        package: RING, executable: "--lib", test: "unpublished_bursts_are_recovered",
    },
    Guard {
        name: "lines of a port",
        file: "crates/offcore-stats/src/pace.rs",
        code: "let allowed = due <= now + self.ahead;", without: "let allowed = due > now;",
        package: "offcore-stats", executable: "--lib", test: "pace_is_kept_after_a_run",
    },
    Guard {
        name: "descriptors that wait",
        file: "crates/offcore-vhost/src/passed.rs",
        code: "self.errands.run(move || drop(fd));", without: "drop(fd);",
        package: VHOST, executable: "control", test: "slow_close_does_not_block",
    },
    Guard {
        name: "last references",
        file: "crates/offcore-vhost/src/backend/device.rs",
        code: ".push(what);", without: ".truncate(0 * Arc::strong_count(&what));",
        package: VHOST, executable: "--lib", test: "worker_never_closes_an_eventfd",
    },
    // ---- workers ----
    Guard {
        name: "turns of ports",
        file: "crates/offcore-flow/src/worker.rs",
        code: "match shared && turns.begin() {", without: "match shared && turns.begin() && *burst > 64 {",
        package: FLOW, executable: "--lib", test: "worker_shares_core_between_ports",
    },
    Guard {
        name: "turns between guests",
        file: "crates/offcore-flow/src/forwarding/guest_pair.rs",
        code: "rules.turn(ctx, turns, |rules, ctx| Self::forward(guests, rules, ctx))", without: "let _ = turns;\n        Self::forward(guests, rules, ctx)",
        package: FLOW, executable: "--lib", test: "packets_between_guests_wait_for_their_turn",
    },
    Guard {
        name: "rests of ports",
        file: "crates/offcore-flow/src/worker/turns.rs",
        code: "            self.rest = later((self.rest != 0).then_some(self.rest), until).max(1);\n", without: "",
        package: FLOW, executable: "--lib", test: "slow_memory_leaves_half_to_others",
    },
    Guard {
        name: "rests after long waits",
        file: "crates/offcore-flow/src/worker/turns.rs",
        code: ".min(self.times.measured).max(ticks)", without: ".min(self.times.measured)",
        package: FLOW, executable: "--lib", test: "long_stalls_leave_half_to_others",
    },
    Guard {
        name: "expensive turns",
        file: "crates/offcore-flow/src/worker/turns.rs",
        code: "rest = if is_expensive { ticks } else { slept };", without: "",
        package: FLOW, executable: "--lib", test: "expensive_receiver_is_throttled",
    },
    Guard {
        name: "sleep beside slow memory",
        file: "crates/offcore-flow/src/worker/idle.rs",
        code: " && now >= self.polls_until", without: "",
        package: FLOW, executable: "--lib", test: "slow_arming_keeps_worker_polling",
    },
    // ---- peers ----
    Guard {
        name: "send buffers in need",
        file: "crates/offcore-tcp/src/proto/ahead.rs",
        code: "memory::is_scarce(arena).then(||", without: "(arena.promised() == usize::MAX).then(||",
        package: TCP, executable: "--lib", test: "scarce_memory_limits_grants",
    },
    Guard {
        name: "timeouts in need",
        file: "crates/offcore-flow/src/host/apps/http/timeouts.rs",
        code: "is_scarce.then(||", without: "(is_scarce && now == 0).then(||",
        package: FLOW, executable: "apps", test: "partial_requests_do_not_exhaust_memory",
    },
    Guard {
        name: "answers to late requests",
        file: "crates/offcore-flow/src/host/apps/http.rs",
        code: "self.late < LATE_ANSWERS", without: "self.late < usize::MAX",
        package: FLOW, executable: "apps", test: "few_late_requests_get_answers",
    },
    // ---- devices ----
    Guard {
        name: "bytes of a partial completion",
        file: "crates/offcore-dsa/src/driver/channel/outcome.rs",
        code: "if record.completed < size { record.completed } else { 0 }", without: "record.completed",
        package: "offcore-dsa", executable: "hostile", test: "any_completion_is_accounted_for",
    },
    // ---- statistics ----
    Guard {
        name: "pages that cannot shrink",
        file: "crates/offcore-stats/src/page/reader.rs",
        code: "seals.contains(SealFlags::SHRINK)", without: "!seals.is_empty()",
        package: "offcore-stats", executable: "--lib", test: "foreign_files_are_refused",
    },
    Guard {
        name: "offsets in the page",
        file: "crates/offcore-stats/src/page/memory.rs",
        code: "is_some_and(|end| end <= self.len)", without: "is_some()",
        package: "offcore-stats", executable: "--lib", test: "damaged_pages_are_refused",
    },
];
