use super::*;
use proptest::prelude::*;

fn header_of(bytes: &[u8]) -> Header {
    Header::decode(bytes[..HEADER].try_into().unwrap()).unwrap()
}

fn decode(bytes: &[u8], fds: Vec<u32>) -> Result<Request<u32>, MessageError> {
    Request::decode(&header_of(bytes), &bytes[HEADER..], fds)
}

fn state() -> impl Strategy<Value = VringState> {
    (any::<u32>(), any::<u32>()).prop_map(|(index, num)| VringState { index, num })
}

fn vring_fd() -> impl Strategy<Value = VringFd<u32>> {
    (any::<u8>(), any::<Option<u32>>()).prop_map(|(index, fd)| VringFd { index, fd })
}

fn region() -> impl Strategy<Value = (MemoryRegion, u32)> {
    (any::<[u64; 4]>(), any::<u32>()).prop_map(|([guest, size, user, mmap_offset], fd)| {
        (MemoryRegion { guest, size, user, mmap_offset }, fd)
    })
}

fn area() -> impl Strategy<Value = InflightArea> {
    any::<(u64, u64, u16, u16)>().prop_map(|(size, offset, queues, queue_size)| InflightArea {
        size,
        offset,
        queues,
        queue_size,
    })
}

fn request() -> impl Strategy<Value = Request<u32>> {
    prop_oneof![
        Just(Request::GetFeatures),
        any::<u64>().prop_map(Request::SetFeatures),
        Just(Request::SetOwner),
        Just(Request::ResetOwner),
        prop::collection::vec(region(), 1..=MAX_REGIONS).prop_map(Request::SetMemTable),
        (any::<[u64; 2]>(), any::<u32>())
            .prop_map(|([size, offset], fd)| Request::SetLogBase(LogArea { size, offset }, fd)),
        state().prop_map(Request::SetVringNum),
        (state(), any::<[u64; 4]>()).prop_map(|(state, [desc, used, avail, log])| {
            Request::SetVringAddr(VringAddr { index: state.index, flags: state.num, desc, used, avail, log })
        }),
        state().prop_map(Request::SetVringBase),
        state().prop_map(Request::GetVringBase),
        vring_fd().prop_map(Request::SetVringKick),
        vring_fd().prop_map(Request::SetVringCall),
        vring_fd().prop_map(Request::SetVringErr),
        Just(Request::GetProtocolFeatures),
        any::<u64>().prop_map(Request::SetProtocolFeatures),
        Just(Request::GetQueueNum),
        state().prop_map(Request::SetVringEnable),
        any::<u64>().prop_map(Request::NetSetMtu),
        any::<u32>().prop_map(Request::SetBackendReqFd),
        Just(Request::ResetDevice),
        Just(Request::GetMaxMemSlots),
        region().prop_map(|(region, fd)| Request::AddMemReg(region, fd)),
        (region(), any::<bool>())
            .prop_map(|((region, fd), old)| Request::RemMemReg(region, old.then_some(fd))),
        area().prop_map(Request::GetInflightFd),
        (area(), any::<u32>()).prop_map(|(area, fd)| Request::SetInflightFd(area, fd)),
        any::<u64>().prop_map(Request::SetStatus),
        Just(Request::GetStatus),
    ]
}

proptest! {
    #[test]
    fn requests_round_trip(request in request(), need_reply: bool) {
        let (bytes, fds) = request.clone().encode(need_reply);
        let header = header_of(&bytes);
        prop_assert_eq!(header, Header {
            code: request.code(), reply: false, need_reply, size: (bytes.len() - HEADER) as u32,
        });
        prop_assert_eq!(decode(&bytes, fds), Ok(request));
    }

    #[test]
    fn a_changed_length_or_count_is_refused(request in request(), cut in 1usize..16, fd: u32) {
        // The only message with an optional file descriptor.
        let removal = matches!(request, Request::RemMemReg(..));
        // The message is also valid without its padding.
        let padded = matches!(request, Request::GetInflightFd(_) | Request::SetInflightFd(..));
        let (mut bytes, mut fds) = request.encode(false);
        fds.push(fd);
        if removal && fds.len() == 1 {
            fds.push(fd);
        }
        let refused = matches!(decode(&bytes, fds.clone()), Err(MessageError::Fds { .. }));
        prop_assert!(refused, "one file descriptor too many");
        fds.pop();
        if fds.pop().is_some() && !removal {
            let refused = matches!(decode(&bytes, fds.clone()), Err(MessageError::Fds { .. }));
            prop_assert!(refused, "one file descriptor too few");
        }
        bytes.extend(vec![0; cut]);
        prop_assert!(decode(&bytes, fds.clone()).is_err(), "payload too long");
        if bytes.len() >= HEADER + 2 * cut && !(padded && cut == 4) {
            bytes.truncate(bytes.len() - 2 * cut);
            prop_assert!(decode(&bytes, fds).is_err(), "payload too short");
        }
    }

    #[test]
    fn replies_round_trip(value: u64, state in state(), area in area(), fd: u32, which in 0..3) {
        let (reply, code) = match which {
            0 => (Reply::Value(value), Code::GET_FEATURES),
            1 => (Reply::Vring(state), Code::GET_VRING_BASE),
            _ => (Reply::Inflight(area, fd), Code::GET_INFLIGHT_FD),
        };
        let (bytes, fd) = reply.clone().encode(code);
        let fds = fd.into_iter().collect();
        prop_assert_eq!(Reply::decode(code, &header_of(&bytes), &bytes[HEADER..], fds), Ok(reply));
    }
}

#[test]
fn message_layouts_match_specification() {
    let (bytes, fds) = Request::SetVringKick(VringFd { index: 3, fd: Some(9) }).encode(true);
    assert_eq!(bytes, [12, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(fds, [9]);
    let (bytes, _) = Request::<u32>::SetVringCall(VringFd { index: 2, fd: None }).encode(false);
    assert_eq!(bytes, [13, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
    let addr = VringAddr { index: 1, flags: 0, desc: 0x10, used: 0x20, avail: 0x30, log: 0x40 };
    let (bytes, _) = Request::<u32>::SetVringAddr(addr).encode(false);
    assert_eq!(bytes.len(), HEADER + 40);
    assert_eq!([bytes[12], bytes[20], bytes[28], bytes[36], bytes[44]], [1, 0x10, 0x20, 0x30, 0x40]);
    let region = MemoryRegion { guest: 1, size: 2, user: 3, mmap_offset: 4 };
    let (bytes, _) = Request::SetMemTable(vec![(region, 0)]).encode(false);
    assert_eq!(bytes.len(), HEADER + 40);
    assert_eq!([bytes[12], bytes[20], bytes[28], bytes[36], bytes[44]], [1, 1, 2, 3, 4]);
    let (bytes, fds) = Request::AddMemReg(region, 9).encode(false);
    assert_eq!((bytes.len(), fds), (HEADER + 40, vec![9]));
    assert_eq!([bytes[0], bytes[12], bytes[20], bytes[28], bytes[36], bytes[44]], [37, 0, 1, 2, 3, 4]);
    let (bytes, fds) = Request::SetBackendReqFd(7).encode(true);
    assert_eq!((bytes, fds), (vec![21, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0], vec![7]));
    let (bytes, _) = Request::<u32>::NetSetMtu(1500).encode(false);
    assert_eq!(bytes[..16], [20, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0xdc, 5, 0, 0]);
    assert_eq!(Reply::<u32>::Value(5).encode(Code::GET_QUEUE_NUM).0[4], 5, "version 1, reply");
    let area = InflightArea { size: 1, offset: 2, queues: 3, queue_size: 4 };
    let (mut bytes, fds) = Request::SetInflightFd(area, 9).encode(false);
    assert_eq!((bytes.len(), &fds[..]), (HEADER + 24, &[9][..]));
    assert_eq!([bytes[0], bytes[12], bytes[20], bytes[28], bytes[30]], [32, 1, 2, 3, 4]);
    bytes.truncate(HEADER + 20);
    bytes[8] = 20;
    assert_eq!(decode(&bytes, fds), Ok(Request::SetInflightFd(area, 9)));
}

#[test]
fn memory_tables_are_checked() {
    let header = Header { code: Code::SET_MEM_TABLE, reply: false, need_reply: false, size: 0 };
    let table = |count: u32, regions: usize, fds: usize| {
        let mut payload = [count.to_ne_bytes(), [0; 4]].concat();
        payload.resize(8 + regions * REGION, 0);
        Request::decode(&header, &payload, vec![0u32; fds])
    };
    assert!(table(2, 2, 2).is_ok());
    assert!(matches!(table(0, 0, 0), Err(MessageError::Regions { found: 0 })));
    assert!(matches!(table(33, 33, 33), Err(MessageError::Regions { found: 33 })));
    assert!(matches!(table(u32::MAX, 1, 1), Err(MessageError::Regions { .. })));
    assert!(matches!(table(3, 2, 3), Err(MessageError::Payload { found: 72, expected: 104, .. })));
    assert!(matches!(table(2, 2, 1), Err(MessageError::Fds { found: 1, expected: 2, .. })));
    assert!(matches!(table(2, 2, 3), Err(MessageError::Fds { found: 3, expected: 2, .. })));
}
