//! What a server and its workers say to each other over a Unix socket.
//!
//! ```text
//! hello    "RFRW" | version u16 | n_build u8 | build          both sides, once; its layout never changes
//! frame    n_bytes u32 | message                              little endian; the message in postcard's format
//! ```
//!
//! The hello decides whether the two sides understand each other, so frames carry no version. A frame's length is checked
//! before anything is allocated for it. All events of an engine's step for all requests travel in one frame: a token costs
//! a dozen bytes and no system call of its own.

use crate::tokens::{
    EmbedRequest, LoadStatus, Refusal, TokenRequest, TokenUpdate, Update as _, VectorUpdate,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Version of the messages. A change of any type that travels needs a new one; a test holds the bytes of this one.
pub const PROTOCOL_VERSION: u16 = 4;
/// Maximum size of a message to a worker: a prompt of three million tokens.
pub(crate) const MAX_TO_WORKER_BYTES: usize = 16 << 20;
/// Maximum size of a message from a worker. Workers send smaller ones: see [`FULL_FRAME_BYTES`].
pub(crate) const MAX_FROM_WORKER_BYTES: usize = 1 << 20;
/// Maximum number of tokens of a prompt and its delivered tokens, or of all texts to embed. A token takes at most five
/// bytes.
pub const MAX_PROMPT_TOKENS: usize = 3_000_000;
/// Maximum number of texts of a request for embeddings.
pub const MAX_TEXTS: usize = 2048;
/// Maximum size of a grammar's source. With the longest prompt it fits into a frame.
pub(crate) const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// A worker starts another frame of events from this size on.
pub(crate) const FULL_FRAME_BYTES: usize = 256 << 10;

const MAGIC: [u8; 4] = *b"RFRW";
const MAX_BUILD_BYTES: usize = 64;
const PREFIX_BYTES: usize = 4;
/// Bytes that are read from a socket at a time.
const READ_BYTES: usize = 64 << 10;

/// The build that this code belongs to.
pub(crate) fn build() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Identifies a request between a server and one worker process.
pub(crate) type WireId = u64;

/// A message to a worker.
#[expect(clippy::large_enum_variant, reason = "a message lives while it is handled, and none is stored")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToWorker<'a> {
    /// Serve a request.
    Submit {
        /// Names the request in events. Ids only increase.
        id: WireId,
        /// How many tokens at the end of the prompt an earlier worker chose and the client has.
        n_delivered: usize,
        /// The request. Its limits on tokens include the delivered ones.
        request: Cow<'a, TokenRequest>,
    },
    /// End a request. It ends with [`FinishedBy::Cancelled`](crate::FinishedBy) unless it has ended already.
    Cancel {
        /// The request.
        id: WireId,
    },
    /// Embed texts.
    Embed {
        /// Names the request in events.
        id: WireId,
        /// The request, without the texts whose vectors an earlier worker delivered.
        request: Cow<'a, EmbedRequest>,
    },
}

/// A message from a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// The models that are loaded at the start are loaded.
    Ready {
        /// Name of the backend.
        backend: String,
    },
    /// What happened to requests, in order for each of them.
    Events(Vec<(WireId, WireEvent)>),
    /// Sent several times a second, whatever the device is doing.
    Heartbeat {
        /// Changes whenever a step ends, an event is sent or the loading of a model advances.
        progress: u64,
        /// Whether a model is being loaded.
        is_loading: bool,
        /// The loaded models.
        models: Vec<LoadStatus>,
    },
    /// The worker cannot go on and exits.
    Failed(LastWords),
}

/// An event of a request on the wire.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum WireEvent {
    /// An update of a reply.
    Update(TokenUpdate),
    /// The request has ended with an error.
    Refused(Refusal),
    /// The vector of the next text.
    Vector(VectorUpdate),
}

impl WireEvent {
    /// Whether no event of the request follows.
    pub(crate) fn is_last(&self) -> bool {
        match self {
            WireEvent::Update(update) => update.is_last(),
            WireEvent::Vector(update) => update.is_last(),
            WireEvent::Refused(_) => true,
        }
    }
}

/// Why a worker exits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastWords {
    /// Whether the device's context is lost.
    pub lost_device: bool,
    /// What happened.
    pub message: String,
    /// An action that may resolve it.
    pub hint: Option<String>,
}

/// Bytes that are not what the protocol demands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The other side is another program.
    #[error("the hello begins with {got:?} instead of {MAGIC:?}")]
    NotAHello {
        /// Its first bytes.
        got: [u8; 4],
    },
    /// The other side speaks another version.
    #[error("the hello has protocol version {theirs}, this process speaks {PROTOCOL_VERSION}")]
    Version {
        /// Its version.
        theirs: u16,
    },
    /// The other side is of another build.
    #[error("the hello is of build {theirs}, this process is of build {ours}")]
    Build {
        /// Its build.
        theirs: String,
        /// This one.
        ours: String,
    },
    /// A frame above the maximum size.
    #[error("a frame has {n_bytes} bytes, the maximum is {max}")]
    FrameTooLarge {
        /// Its size.
        n_bytes: usize,
        /// Maximum size.
        max: usize,
    },
    /// A frame whose content is not a message.
    #[error("a frame of {n_bytes} bytes is not a message: {because}")]
    Malformed {
        /// Its size.
        n_bytes: usize,
        /// What is wrong with it.
        because: String,
    },
}

impl ProtocolError {
    /// An action that may resolve the error.
    pub fn hint(&self) -> Option<String> {
        match self {
            ProtocolError::Version { .. } | ProtocolError::Build { .. } => {
                Some("restart the server, so that it and its workers are of the same build".into())
            }
            ProtocolError::NotAHello { .. } => Some("start workers with the program of the server".into()),
            ProtocolError::FrameTooLarge { .. } | ProtocolError::Malformed { .. } => None,
        }
    }
}

/// The hello of a build.
pub(crate) fn hello(build: &str) -> Vec<u8> {
    let build = &build.as_bytes()[..build.len().min(MAX_BUILD_BYTES)];
    let mut bytes = MAGIC.to_vec();
    bytes.extend(PROTOCOL_VERSION.to_le_bytes());
    bytes.push(build.len() as u8);
    bytes.extend(build);
    bytes
}

/// Appends a message as a frame. `max` is the maximum size of the message.
pub(crate) fn encode<T: Serialize>(message: &T, max: usize, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
    let start = out.len();
    out.extend([0; PREFIX_BYTES]);
    let encoded = postcard::serialize_with_flavor(message, Appender(out));
    let n_bytes = out.len() - start - PREFIX_BYTES;
    let checked = match encoded {
        Err(error) => Err(ProtocolError::Malformed { n_bytes, because: error.to_string() }),
        Ok(()) if n_bytes > max => Err(ProtocolError::FrameTooLarge { n_bytes, max }),
        // Both maxima are far below 4 GiB.
        Ok(()) => Ok(n_bytes as u32),
    };
    match checked {
        Ok(n_bytes) => out[start..start + PREFIX_BYTES].copy_from_slice(&n_bytes.to_le_bytes()),
        Err(_) => out.truncate(start),
    }
    checked.map(drop)
}

/// Lets postcard append to a buffer that is reused.
struct Appender<'a>(&'a mut Vec<u8>);

impl postcard::ser_flavors::Flavor for Appender<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// Received bytes, cut into frames. Memory is bounded by the maximum size of a frame.
#[derive(Debug)]
pub(crate) struct FrameBuffer {
    bytes: Vec<u8>,
    /// Received and not yet consumed: `bytes[start..end]`.
    start: usize,
    end: usize,
    max: usize,
}

impl FrameBuffer {
    /// A buffer for messages of at most `max` bytes.
    pub(crate) fn new(max: usize) -> FrameBuffer {
        FrameBuffer { bytes: Vec::new(), start: 0, end: 0, max }
    }

    /// Where the next bytes go, of nonzero length. Call [`FrameBuffer::filled`] with their number.
    pub(crate) fn spare(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && self.bytes.len() - self.end < READ_BYTES {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        // A long frame grows the buffer as its bytes arrive, so a length alone reserves nothing.
        if self.bytes.len() - self.end < READ_BYTES {
            self.bytes.resize(self.end + READ_BYTES, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// Adds the first `n` bytes of the spare part to those received.
    pub(crate) fn filled(&mut self, n: usize) {
        self.end = (self.end + n).min(self.bytes.len());
    }

    /// Decodes the next message, if all of it was received.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ProtocolError> {
        let received = &self.bytes[self.start..self.end];
        let Some((prefix, rest)) = received.split_first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let n_bytes = u32::from_le_bytes(*prefix) as usize;
        if n_bytes > self.max {
            return Err(ProtocolError::FrameTooLarge { n_bytes, max: self.max });
        }
        let Some(frame) = rest.get(..n_bytes) else { return Ok(None) };
        let malformed = |because: String| ProtocolError::Malformed { n_bytes, because };
        let (message, left) =
            postcard::take_from_bytes(frame).map_err(|error| malformed(error.to_string()))?;
        if !left.is_empty() {
            return Err(malformed(format!("{} bytes follow it", left.len())));
        }
        self.start += PREFIX_BYTES + n_bytes;
        Ok(Some(message))
    }

    /// Checks the hello of the other side against this build; false while not all of it was received.
    pub(crate) fn next_hello(&mut self, ours: &str) -> Result<bool, ProtocolError> {
        let received = &self.bytes[self.start..self.end];
        let Some((magic, rest)) = received.split_first_chunk::<4>() else { return Ok(false) };
        if *magic != MAGIC {
            return Err(ProtocolError::NotAHello { got: *magic });
        }
        let Some((version, rest)) = rest.split_first_chunk::<2>() else { return Ok(false) };
        let theirs = u16::from_le_bytes(*version);
        if theirs != PROTOCOL_VERSION {
            return Err(ProtocolError::Version { theirs });
        }
        let Some((n_build, rest)) = rest.split_first() else { return Ok(false) };
        let Some(build) = rest.get(..usize::from(*n_build)) else { return Ok(false) };
        if build != ours.as_bytes() {
            let theirs = String::from_utf8_lossy(build).escape_debug().to_string();
            return Err(ProtocolError::Build { theirs, ours: ours.to_owned() });
        }
        self.start += 7 + build.len();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode_all(bytes: &[u8], size: usize) -> Result<Vec<FromWorker>, ProtocolError> {
        let (mut buffer, mut messages) = (FrameBuffer::new(MAX_FROM_WORKER_BYTES), Vec::new());
        for piece in bytes.chunks(size) {
            buffer.spare()[..piece.len()].copy_from_slice(piece);
            buffer.filled(piece.len());
            while let Some(message) = buffer.next()? {
                messages.push(message);
            }
        }
        Ok(messages)
    }

    #[test]
    fn the_bytes_of_this_version_do_not_change() {
        let update = TokenUpdate::Token { token: 300, logprob: -1.0, top: vec![(1, 0.5)] };
        let mut bytes = Vec::new();
        let message = FromWorker::Events(vec![(5, WireEvent::Update(update))]);
        encode(&message, MAX_FROM_WORKER_BYTES, &mut bytes).unwrap();
        let event = [1, 1, 5, 0, 1, 0xac, 2, 0, 0, 0x80, 0xbf, 1, 1, 0, 0, 0, 0x3f];
        assert_eq!(bytes, [&[17, 0, 0, 0], &event[..]].concat());
        assert_eq!(hello("a"), *b"RFRW\x04\0\x01a");
        let mut bytes = Vec::new();
        let vector = VectorUpdate { vector: vec![0.5], is_last: true };
        encode(&FromWorker::Events(vec![(5, WireEvent::Vector(vector))]), MAX_FROM_WORKER_BYTES, &mut bytes)
            .unwrap();
        assert_eq!(bytes, [10, 0, 0, 0, 1, 1, 5, 2, 1, 0, 0, 0, 0x3f, 1]);
    }

    #[test]
    fn messages_are_the_same_wherever_the_stream_is_cut() {
        let mut bytes = Vec::new();
        let ready = FromWorker::Ready { backend: "cpu".into() };
        for _ in 0..3 {
            encode(&ready, MAX_FROM_WORKER_BYTES, &mut bytes).unwrap();
        }
        for size in 1..bytes.len() {
            assert_eq!(decode_all(&bytes, size).unwrap(), vec![ready.clone(); 3], "pieces of {size} bytes");
        }
    }

    #[test]
    fn a_length_alone_reserves_nothing() {
        let mut buffer = FrameBuffer::new(MAX_TO_WORKER_BYTES);
        buffer.spare()[..4].copy_from_slice(&(MAX_TO_WORKER_BYTES as u32).to_le_bytes());
        buffer.filled(4);
        assert_eq!(buffer.next::<FromWorker>(), Ok(None));
        assert!(buffer.spare().len() <= 2 * READ_BYTES);
    }

    /// A frame of each kind of message.
    fn frames() -> (Vec<u8>, Vec<u8>) {
        let (mut to, mut from) = (Vec::new(), Vec::new());
        let embed = EmbedRequest { model: "m".into(), inputs: vec![vec![1, 300], vec![7]], user: 9 };
        let request = crate::pool::test_request(&[1, 2], 3);
        for message in [
            ToWorker::Submit { id: 1, n_delivered: 1, request: Cow::Owned(request) },
            ToWorker::Cancel { id: 1 },
            ToWorker::Embed { id: 2, request: Cow::Owned(embed) },
        ] {
            encode(&message, MAX_TO_WORKER_BYTES, &mut to).unwrap();
        }
        let vector = VectorUpdate { vector: vec![0.5; 4], is_last: true };
        let update = TokenUpdate::Token { token: 3, logprob: -1.0, top: vec![(1, 0.5)] };
        let load = LoadStatus { model: "m".into(), ..LoadStatus::default() };
        for message in [
            FromWorker::Ready { backend: "cpu".into() },
            FromWorker::Events(vec![(1, WireEvent::Update(update)), (2, WireEvent::Vector(vector))]),
            FromWorker::Heartbeat { progress: 1, is_loading: false, models: vec![load] },
            FromWorker::Failed(LastWords { lost_device: true, message: "m".into(), hint: None }),
        ] {
            encode(&message, MAX_FROM_WORKER_BYTES, &mut from).unwrap();
        }
        (to, from)
    }

    fn decode_to_worker(bytes: &[u8]) -> Result<usize, ProtocolError> {
        let (mut buffer, mut n) = (FrameBuffer::new(MAX_TO_WORKER_BYTES), 0);
        for piece in bytes.chunks(READ_BYTES) {
            buffer.spare()[..piece.len()].copy_from_slice(piece);
            buffer.filled(piece.len());
            while buffer.next::<ToWorker<'static>>()?.is_some() {
                n += 1;
            }
        }
        Ok(n)
    }

    proptest! {
        #[test]
        fn damaged_frames_are_messages_or_errors(
            damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let (mut to, mut from) = frames();
            prop_assert_eq!(decode_to_worker(&to), Ok(3));
            prop_assert_eq!(decode_all(&from, 9).map(|all| all.len()), Ok(4));
            for (at, value) in damage {
                let (to_idx, from_idx) = (at.index(to.len()), at.index(from.len()));
                (to[to_idx], from[from_idx]) = (value, value);
            }
            let _ = decode_to_worker(&to);
            let _ = decode_all(&from, 9);
            let _ = decode_all(&from[..cut.index(from.len())], 50);
        }

        #[test]
        fn arbitrary_bytes_are_messages_or_errors(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
            framed.extend(&bytes);
            let _ = decode_all(&framed, 7);
            let _ = decode_all(&bytes, 7);
        }
    }
}
