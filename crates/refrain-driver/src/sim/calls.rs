//! Driver calls by name, for attaching faults and counting.

macro_rules! calls {
    ($($variant:ident $name:literal),* $(,)?) => {
        /// A driver call; one per method of [`crate::api::Api`] that reaches a real driver.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum DriverCall {
            $(#[doc = concat!("`Api::", $name, "`.")] $variant),*
        }

        impl DriverCall {
            /// Every call, in the order of [`crate::api::Api`].
            pub const ALL: &'static [DriverCall] = &[$(DriverCall::$variant),*];

            /// Name of the method of [`crate::api::Api`].
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(DriverCall::$variant => $name),* }
            }
        }
    };
}

calls! {
    DriverVersion "driver_version",
    DeviceCount "device_count",
    DeviceInfo "device_info",
    PrimaryCtxRetain "primary_ctx_retain",
    PrimaryCtxRelease "primary_ctx_release",
    CtxCreate "ctx_create",
    CtxDestroy "ctx_destroy",
    CtxSetCurrent "ctx_set_current",
    CtxSynchronize "ctx_synchronize",
    MemInfo "mem_info",
    Alloc "alloc",
    Free "free",
    AllocHost "alloc_host",
    FreeHost "free_host",
    AllocManaged "alloc_managed",
    AllocAsync "alloc_async",
    FreeAsync "free_async",
    MemcpyHtod "memcpy_htod",
    MemcpyDtoh "memcpy_dtoh",
    MemcpyHtodAsync "memcpy_htod_async",
    MemcpyDtohAsync "memcpy_dtoh_async",
    MemcpyDtodAsync "memcpy_dtod_async",
    MemsetAsync "memset_async",
    StreamCreate "stream_create",
    StreamDestroy "stream_destroy",
    StreamSynchronize "stream_synchronize",
    StreamQuery "stream_query",
    StreamWaitEvent "stream_wait_event",
    StreamBeginCapture "stream_begin_capture",
    StreamEndCapture "stream_end_capture",
    StreamIsCapturing "stream_is_capturing",
    StreamCaptureInfo "stream_capture_info",
    LaunchHostFunc "launch_host_func",
    EventCreate "event_create",
    EventDestroy "event_destroy",
    EventRecord "event_record",
    EventQuery "event_query",
    EventSynchronize "event_synchronize",
    EventElapsed "event_elapsed",
    ModuleLoad "module_load",
    ModuleUnload "module_unload",
    ModuleFunction "module_function",
    FunctionParams "function_params",
    FunctionAttribute "function_attribute",
    FunctionSetAttribute "function_set_attribute",
    Occupancy "occupancy",
    Launch "launch",
    GraphCreate "graph_create",
    GraphDestroy "graph_destroy",
    GraphAddKernel "graph_add_kernel",
    GraphAddMemcpy "graph_add_memcpy",
    GraphAddMemset "graph_add_memset",
    GraphAddChild "graph_add_child",
    GraphAddEmpty "graph_add_empty",
    GraphAddHost "graph_add_host",
    GraphCondition "graph_condition",
    GraphAddLoop "graph_add_loop",
    GraphNodes "graph_nodes",
    GraphEdges "graph_edges",
    GraphChild "graph_child",
    GraphInstantiate "graph_instantiate",
    ExecDestroy "exec_destroy",
    ExecUpload "exec_upload",
    ExecLaunch "exec_launch",
}

impl DriverCall {
    /// True if the call submits device work that runs after it returns, so that a sticky fault shows later.
    pub(super) const fn runs_later(self) -> bool {
        matches!(
            self,
            DriverCall::Launch
                | DriverCall::ExecLaunch
                | DriverCall::MemcpyHtodAsync
                | DriverCall::MemcpyDtohAsync
                | DriverCall::MemcpyDtodAsync
                | DriverCall::MemsetAsync
        )
    }

    /// True if the call's work writes bytes, which a fault can corrupt.
    pub(super) const fn writes(self) -> bool {
        self.runs_later() || matches!(self, DriverCall::MemcpyHtod | DriverCall::MemcpyDtoh)
    }

    /// True if the call needs no context and still succeeds after a sticky fault.
    pub(super) const fn survives_sticky(self) -> bool {
        matches!(self, DriverCall::DriverVersion | DriverCall::DeviceCount | DriverCall::DeviceInfo)
    }
}

/// Words of a script that name several calls, or one call by a shorter name than its method's.
pub(super) const FAMILIES: &[(&[&str], &[DriverCall])] = {
    use DriverCall as C;
    &[
        (&["allocation"], &[C::Alloc, C::AllocHost, C::AllocManaged, C::AllocAsync]),
        (
            &["copy"],
            &[C::MemcpyHtod, C::MemcpyDtoh, C::MemcpyHtodAsync, C::MemcpyDtohAsync, C::MemcpyDtodAsync],
        ),
        (&["upload"], &[C::MemcpyHtod, C::MemcpyHtodAsync]),
        (&["download"], &[C::MemcpyDtoh, C::MemcpyDtohAsync]),
        (&["fill", "memset"], &[C::MemsetAsync]),
        (&["wait", "sync", "synchronize"], &[C::StreamSynchronize, C::CtxSynchronize, C::EventSynchronize]),
        (&["query"], &[C::StreamQuery, C::EventQuery]),
        (&["context"], &[C::CtxCreate, C::PrimaryCtxRetain]),
        (&["wait_event"], &[C::StreamWaitEvent]),
        (&["begin_capture"], &[C::StreamBeginCapture]),
        (&["end_capture"], &[C::StreamEndCapture]),
        (&["is_capturing"], &[C::StreamIsCapturing, C::StreamCaptureInfo]),
        (
            &["add_node"],
            &[
                C::GraphAddKernel,
                C::GraphAddMemcpy,
                C::GraphAddMemset,
                C::GraphAddChild,
                C::GraphAddEmpty,
                C::GraphAddHost,
                C::GraphAddLoop,
            ],
        ),
        (&["instantiate"], &[C::GraphInstantiate]),
        (&["replay", "graph_launch"], &[C::ExecLaunch]),
    ]
};

/// A set of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallSet(u128);

const _: () = assert!(DriverCall::ALL.len() <= 128);

impl CallSet {
    pub(super) const ANY: CallSet = CallSet(u128::MAX);

    pub(super) fn of(calls: &[DriverCall]) -> CallSet {
        CallSet(calls.iter().fold(0, |set, &call| set | 1 << call as u32))
    }

    pub(super) const fn contains(self, call: DriverCall) -> bool {
        self.0 >> call as u32 & 1 == 1
    }

    pub(super) fn all(self, test: impl Fn(DriverCall) -> bool) -> bool {
        DriverCall::ALL.iter().all(|&call| !self.contains(call) || test(call))
    }

    /// Calls that a word of a script names: a method name, a short form, or a family of calls.
    pub(super) fn from_word(word: &str) -> Option<CallSet> {
        if word == "call" {
            return Some(CallSet::ANY);
        }
        let family = FAMILIES.iter().find(|(words, _)| words.contains(&word));
        let method = || DriverCall::ALL.iter().find(|c| c.name() == word).map(|&c| CallSet::of(&[c]));
        family.map(|(_, calls)| CallSet::of(calls)).or_else(method)
    }

    /// The words that [`CallSet::from_word`] knows in addition to method names.
    pub(super) const SHORT_WORDS: &'static str = "launch, replay, alloc, allocation, copy, upload, download, fill, \
        wait, query, begin_capture, end_capture, is_capturing, add_node, instantiate, module_load, context, call";
}
