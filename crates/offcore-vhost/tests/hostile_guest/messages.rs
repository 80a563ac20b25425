//! vhost-user messages with arbitrary bytes: each is decoded or refused with a message, and a decoded message is
//! encoded to the same bytes.

use offcore_vhost::message::{Code, HEADER, Header, MAX_FDS, MAX_PAYLOAD, Reply, Request};

/// Decodes the messages at the start of `bytes`. The first byte is the number of file descriptors for each message.
///
/// # Panics
/// Panics if an accepted message is not exactly equal to the sent one.
pub(crate) fn decode(bytes: &[u8]) -> usize {
    let Some((&fds, mut bytes)) = bytes.split_first() else { return 0 };
    let fds = usize::from(fds) % (MAX_FDS + 2);
    let mut accepted = 0;
    while let Some((head, rest)) = bytes.split_first_chunk::<HEADER>() {
        let header = match Header::decode(*head) {
            Ok(header) => header,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                break;
            }
        };
        assert_eq!(header.encode(), *head);
        assert!(header.size as usize <= MAX_PAYLOAD);
        let (payload, rest) = rest.split_at(rest.len().min(header.size as usize));
        match Request::decode(&header, payload, (0..fds).collect::<Vec<_>>()) {
            Ok(request) => {
                accepted += 1;
                let sent_fds = fds;
                let (again, fds) = request.clone().encode(header.need_reply);
                assert!(fds.iter().copied().eq(0..sent_fds), "no file descriptor is lost");
                // Decoding drops padding.
                let padded = matches!(
                    header.code,
                    Code::SET_MEM_TABLE
                        | Code::ADD_MEM_REG
                        | Code::REM_MEM_REG
                        | Code::GET_INFLIGHT_FD
                        | Code::SET_INFLIGHT_FD
                );
                assert!(padded || again[HEADER..] == *payload, "{request:?}");
                let header = Header::decode(again[..HEADER].try_into().unwrap()).unwrap();
                assert_eq!(Request::decode(&header, &again[HEADER..], fds).as_ref(), Ok(&request));
                // A region for descriptors in flight is also valid without C's padding.
                let unpadded = matches!(request, Request::GetInflightFd(_) | Request::SetInflightFd(..))
                    && payload.len() == 20;
                assert_eq!(again.len() - HEADER, payload.len() + if unpadded { 4 } else { 0 });
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        for code in [header.code, Code::GET_VRING_BASE] {
            if let Err(error) = Reply::decode(code, &header, payload, (0..fds).collect()) {
                assert!(!error.to_string().is_empty());
            }
        }
        bytes = rest;
    }
    accepted
}
