//! libibverbs behind the table of verbs that `rdma` uses. The library is opened at run time; without it there is no NIC.
//!
//! One value is one port of one opened NIC, with a descriptor of its own that becomes readable at completions and events.
//! Handles are the library's pointers, as numbers. Forking is left to kernels from 5.12 on, which copy pinned pages.
#![allow(unsafe_code)]

use core::ffi::{CStr, c_int};
use core::mem::{MaybeUninit, size_of, zeroed};
use core::ptr::{NonNull, null_mut};
use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys as sys;
use rustix::event::epoll;

use super::rdma::NicError;
use super::rdma::gid::{GidEntry, GidKind};
use super::rdma::verbs::{
    Completion, Completions, Depths, Domain, Made, NicEvent, NicLimits, Operation, Path, PortState, PostedSome,
    QueuePair, Reach, ReceiveRequest, Registered, Registration, SendRequest, Status, Verbs, VerbsError,
};

/// Completions taken by one poll.
const POLL_MAX: usize = 32;
/// How often the NIC sends again: a peer that is gone is found after seven timeouts. One less than can be asked for, since
/// Soft-RoCE takes 7 for "for ever" (seen: a dead peer was not found in 30 s).
const RETRIES: u8 = 6;
/// How often it tries a peer without a receive request: for ever; there always is one, and the link has a deadline of its own.
const NOT_READY_RETRIES: u8 = 7;
/// How long such a peer asks to wait: 0.64 ms.
const NOT_READY_TIMER: u8 = 12;
const HOP_LIMIT: u8 = 64;
/// Addresses that are asked for, those of all ports together: the kernel takes a reply of at most 64 KiB less one byte, of 32
/// each, and gives those that are set.
const GIDS_MAX: usize = 1024;

#[derive(Default)]
struct Scratch {
    sends: Vec<sys::ibv_send_wr>,
    receives: Vec<sys::ibv_recv_wr>,
    pieces: Vec<sys::ibv_sge>,
}

struct Inner {
    context: *mut sys::ibv_context,
    channel: *mut sys::ibv_comp_channel,
    port: u8,
    name: String,
    limits: NicLimits,
    epoll: OwnedFd,
    scratch: Mutex<Scratch>,
    pairs: Mutex<HashSet<usize>>,
}

/// One port of one opened NIC. Clones are the same.
///
/// Example: `hal/tests/rdma_guest.rs`.
#[derive(Clone)]
pub struct Ibverbs(Arc<Inner>);

// SAFETY:
// - the raw pointers block both. libibverbs is thread-safe for objects of one context; `scratch` is behind a lock; a handle is
//   used by one thread at a time, since the backend has its device behind one lock. Test: `conformance` in the guest moves
//   a posted fabric to another thread.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

impl core::fmt::Debug for Ibverbs {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Ibverbs").field("name", &self.0.name).field("port", &self.0.port).finish_non_exhaustive()
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(5)
}

fn failed(verb: &'static str) -> VerbsError {
    VerbsError { verb, code: errno() }
}

fn checked(verb: &'static str, code: c_int) -> Result<(), VerbsError> {
    if code == 0 { Ok(()) } else { Err(VerbsError { verb, code: if code > 0 { code } else { errno() } }) }
}

fn as_handle<T>(pointer: *mut T, verb: &'static str) -> Result<usize, VerbsError> {
    if pointer.is_null() { Err(failed(verb)) } else { Ok(pointer.expose_provenance()) }
}

fn pointer<T>(handle: usize) -> *mut T {
    core::ptr::with_exposed_provenance_mut(handle)
}

/// Does something with each NIC that the library knows.
fn with_devices<T>(act: impl FnOnce(&[(String, *mut sys::ibv_device)]) -> T) -> Result<T, NicError> {
    let mut count = 0;
    // SAFETY: `count` is valid for the write.
    let list = unsafe { sys::ibv_get_device_list(&mut count) };
    if list.is_null() {
        return Err(NicError::NoDevice {
            reason: "libibverbs.so.1 cannot be opened, or the kernel has no RDMA support",
        });
    }
    let devices: Vec<_> = (0..usize::try_from(count).unwrap_or(0))
        .map(|index| {
            // SAFETY: the list has `count` entries; a device's name is a string that lives as long as the list.
            unsafe {
                let device = *list.add(index);
                (CStr::from_ptr(sys::ibv_get_device_name(device)).to_string_lossy().into_owned(), device)
            }
        })
        .collect();
    let result = act(&devices);
    // SAFETY: from `ibv_get_device_list`, freed once; opened devices live on.
    unsafe { sys::ibv_free_device_list(list) };
    Ok(result)
}

/// Names of the NICs of this host.
///
/// # Errors
/// There is no libibverbs, or no support in the kernel.
///
/// ```
/// // Without a NIC this says what is missing, or is empty.
/// match millpond_hal::backend::rdma_verbs::names() {
///     Ok(names) => assert!(names.iter().all(|name| !name.is_empty())),
///     Err(error) => assert!(error.to_string().contains("RDMA")),
/// }
/// ```
pub fn names() -> Result<Vec<String>, NicError> {
    with_devices(|devices| devices.iter().map(|(name, _)| name.clone()).collect())
}

impl Ibverbs {
    /// Opens a NIC by name, or the first one, at that port (the first is 1). Takes milliseconds.
    ///
    /// # Errors
    /// No library, no such NIC, or it cannot be opened: `/dev/infiniband/uverbs*` must be readable and writable.
    pub fn open(name: Option<&str>, port: u8) -> Result<Self, NicError> {
        let opened = with_devices(|devices| {
            let Some((first, _)) = devices.first() else {
                return Err(NicError::NoDevice { reason: "this host has none" });
            };
            let name = name.unwrap_or(first);
            let Some((_, device)) = devices.iter().find(|(known, _)| known == name) else {
                let known: Vec<_> = devices.iter().map(|(name, _)| name.as_str()).collect();
                return Err(NicError::UnknownDevice { name: name.to_owned(), known: known.join(" ") });
            };
            // SAFETY: the device is of the list, which lives until this closure returns.
            let context = unsafe { sys::ibv_open_device(*device) };
            let nic = name.to_owned();
            if context.is_null() {
                return Err(NicError::Verbs { nic, error: failed("ibv_open_device") });
            }
            Ok((nic, context))
        })?;
        let (name, context) = opened?;
        Self::set_up(&name, context, port).map_err(|error| {
            // SAFETY: opened above, and nothing of it is left: `set_up` undoes what it did.
            unsafe { sys::ibv_close_device(context) };
            NicError::Verbs { nic: name, error }
        })
    }

    fn set_up(name: &str, context: *mut sys::ibv_context, port: u8) -> Result<Self, VerbsError> {
        let limits = limits(context, port)?;
        let system = |verb| move |error: rustix::io::Errno| VerbsError { verb, code: error.raw_os_error() };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        // SAFETY: the context is open.
        let channel = unsafe { sys::ibv_create_comp_channel(context) };
        as_handle(channel, "ibv_create_comp_channel")?;
        // SAFETY: both are open, and their descriptors with them.
        let fds = unsafe { [(*channel).fd, (*context).async_fd].map(|fd| BorrowedFd::borrow_raw(fd)) };
        let watched = fds.iter().try_for_each(|fd| {
            rustix::io::ioctl_fionbio(fd, true)?;
            epoll::add(&epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
        });
        if let Err(error) = watched {
            // SAFETY: made above, used by nothing.
            unsafe { sys::ibv_destroy_comp_channel(channel) };
            return Err(VerbsError { verb: "watching the NIC's descriptors", code: error.raw_os_error() });
        }
        let (name, scratch, pairs) = (name.to_owned(), Mutex::default(), Mutex::default());
        Ok(Self(Arc::new(Inner { context, channel, port, name, limits, epoll, scratch, pairs })))
    }

    /// Puts every queue pair into error, which flushes its requests: what a reset does to them. For tests of what follows.
    pub fn fail_all(&self) {
        for pair in self.0.pairs.lock().iter() {
            // SAFETY: all zeros is a valid value; the queue pair exists: it leaves the set before it is destroyed.
            unsafe {
                let mut attributes: sys::ibv_qp_attr = zeroed();
                attributes.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
                sys::ibv_modify_qp(pointer(*pair), &mut attributes, mask(&[sys::ibv_qp_attr_mask::IBV_QP_STATE]));
            }
        }
    }

    fn modify(
        &self,
        queue_pair: QueuePair,
        attributes: &mut sys::ibv_qp_attr,
        fields: &[sys::ibv_qp_attr_mask],
    ) -> Result<(), VerbsError> {
        // SAFETY: the queue pair exists, by the rule for handles; the attributes named are set.
        checked("ibv_modify_qp", unsafe { sys::ibv_modify_qp(pointer(queue_pair.0), attributes, mask(fields)) })
    }

    fn initialise(&self, queue_pair: QueuePair) -> Result<(), VerbsError> {
        use sys::ibv_qp_attr_mask as field;
        // SAFETY: all zeros is a valid value.
        let mut attributes: sys::ibv_qp_attr = unsafe { zeroed() };
        attributes.qp_state = sys::ibv_qp_state::IBV_QPS_INIT;
        attributes.port_num = self.0.port;
        attributes.qp_access_flags = access(Reach::RemoteReadWrite);
        let fields = [field::IBV_QP_STATE, field::IBV_QP_PKEY_INDEX, field::IBV_QP_PORT, field::IBV_QP_ACCESS_FLAGS];
        self.modify(queue_pair, &mut attributes, &fields)
    }
}

fn mask(fields: &[sys::ibv_qp_attr_mask]) -> c_int {
    fields.iter().fold(0, |bits, field| bits | field.0).cast_signed()
}

fn access(reach: Reach) -> u32 {
    use sys::ibv_access_flags as flag;
    let read = flag::IBV_ACCESS_REMOTE_READ.0;
    // A remote writer needs the local right as well.
    let write = flag::IBV_ACCESS_REMOTE_WRITE.0 | flag::IBV_ACCESS_LOCAL_WRITE.0;
    match reach {
        Reach::Local => flag::IBV_ACCESS_LOCAL_WRITE.0,
        Reach::RemoteRead => read,
        Reach::RemoteWrite => write,
        Reach::RemoteReadWrite => read | write,
    }
}

fn query_port(context: *mut sys::ibv_context, port: u8) -> Result<sys::ibv_port_attr, VerbsError> {
    // SAFETY: all zeros is a valid value.
    let mut attributes: sys::ibv_port_attr = unsafe { zeroed() };
    // SAFETY: the context is open.
    checked("ibv_query_port", unsafe { sys::ibv_query_port(context, port, &mut attributes) })?;
    Ok(attributes)
}

fn limits(context: *mut sys::ibv_context, port: u8) -> Result<NicLimits, VerbsError> {
    let port = query_port(context, port)?;
    // SAFETY: all zeros is a valid value.
    let mut device: sys::ibv_device_attr = unsafe { zeroed() };
    // SAFETY: the context is open.
    checked("ibv_query_device", unsafe { sys::ibv_query_device(context, &mut device) })?;
    let count = |field: c_int| u32::try_from(field).unwrap_or(0);
    let reads = count(device.max_qp_rd_atom.min(device.max_qp_init_rd_atom)).clamp(1, 16);
    Ok(NicLimits {
        registration_len_max: device.max_mr_size,
        message_len_max: port.max_msg_sz,
        queue_pairs_max: count(device.max_qp),
        depth_max: count(device.max_qp_wr),
        completions_max: count(device.max_cqe),
        reads_max: u8::try_from(reads).unwrap_or(16),
    })
}

fn mtu_code(len: u32) -> u32 {
    // 256 bytes are 1, each doubling one more, 4,096 are 5.
    len.clamp(256, 4096).ilog2() - 7
}

/// Name of a network interface; `None` for a number that is none.
fn interface(index: u32) -> Option<String> {
    let mut name: [core::ffi::c_char; 16] = [0; 16];
    // SAFETY: the buffer has the length that the call asks for (IF_NAMESIZE).
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    // SAFETY: where it was found, the buffer holds a string with its end.
    (!found.is_null()).then(|| unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

fn status(code: u32) -> Status {
    use sys::ibv_wc_status as known;
    match code {
        known::IBV_WC_SUCCESS => Status::Done,
        known::IBV_WC_WR_FLUSH_ERR => Status::Flushed,
        known::IBV_WC_REM_ACCESS_ERR => Status::RemoteAccess,
        known::IBV_WC_RETRY_EXC_ERR | known::IBV_WC_RESP_TIMEOUT_ERR => Status::NoAnswer,
        known::IBV_WC_RNR_RETRY_EXC_ERR => Status::NotReady,
        other => Status::Other(other),
    }
}

fn completion(entry: &sys::ibv_wc) -> Completion {
    let has_immediate = entry.wc_flags & sys::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
    // SAFETY: both fields of the union are 32 bits, and the flag says which one it is.
    let immediate = has_immediate.then(|| u32::from_be(unsafe { entry.imm_data_invalidated_rkey_union.imm_data }));
    Completion { id: entry.wr_id, status: status(entry.status), immediate, len: entry.byte_len }
}

fn fill_send(request: &SendRequest, entry: &mut sys::ibv_send_wr) {
    use sys::{ibv_send_flags as flag, ibv_wr_opcode as opcode};
    entry.wr_id = request.id;
    entry.num_sge = c_int::from(request.len > 0);
    entry.opcode = match request.operation {
        Operation::Send => opcode::IBV_WR_SEND,
        Operation::Write => opcode::IBV_WR_RDMA_WRITE,
        Operation::WriteWithImmediate(_) => opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        Operation::Read => opcode::IBV_WR_RDMA_READ,
    };
    let signalled = if request.is_signalled { flag::IBV_SEND_SIGNALED.0 } else { 0 };
    let inline = if request.is_inline { flag::IBV_SEND_INLINE.0 } else { 0 };
    entry.send_flags = signalled | inline;
    if let Operation::WriteWithImmediate(immediate) = request.operation {
        entry.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
    }
    entry.wr.rdma = sys::rdma_t { remote_addr: request.remote, rkey: request.remote_key };
}

/// How many entries of a chain come before `bad`.
fn posted<T>(first: *const T, bad: *const T) -> usize {
    if bad.is_null() { 0 } else { bad.addr().saturating_sub(first.addr()) / size_of::<T>() }
}

// SAFETY: duty by duty:
// - the library and the NIC touch memory by registrations and requests only; `deregister` and `destroy_queue_pair` return after
//   the NIC has let go, as verbs promise.
// - inline requests are copied into the send queue by `ibv_post_send`.
unsafe impl Verbs for Ibverbs {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn limits(&self) -> NicLimits {
        self.0.limits
    }

    fn port(&self) -> Result<PortState, VerbsError> {
        let port = query_port(self.0.context, self.0.port)?;
        Ok(PortState {
            is_active: port.state == sys::ibv_port_state::IBV_PORT_ACTIVE,
            mtu_len: 128 << port.active_mtu,
            lid: port.lid,
            // IBV_LINK_LAYER_ETHERNET.
            is_ethernet: port.link_layer == 2,
        })
    }

    fn gids(&self) -> Result<Vec<GidEntry>, VerbsError> {
        // SAFETY: all zeros is a valid value.
        let mut entries: Vec<sys::ibv_gid_entry> = (0..GIDS_MAX).map(|_| unsafe { zeroed() }).collect();
        // SAFETY: the context is open, and the array has the length that is told.
        let count = unsafe { sys::ibv_query_gid_table(self.0.context, entries.as_mut_ptr(), entries.len(), 0) };
        let verb = "ibv_query_gid_table";
        let count =
            usize::try_from(count).map_err(|_| VerbsError { verb, code: i32::try_from(-count).unwrap_or(5) })?;
        let own = entries.iter().take(count).filter(|entry| entry.port_num == u32::from(self.0.port));
        Ok(own
            .filter_map(|entry| {
                let kind = match entry.gid_type {
                    0 => GidKind::InfiniBand,
                    1 => GidKind::RoceV1,
                    2 => GidKind::RoceV2,
                    _ => return None,
                };
                // SAFETY: each field of the union is the same 16 bytes.
                let gid = unsafe { entry.gid.raw };
                let index = u8::try_from(entry.gid_index).ok()?;
                Some(GidEntry { index, gid, kind, interface: interface(entry.ndev_ifindex) })
            })
            .collect())
    }

    fn create_domain(&self) -> Result<Domain, VerbsError> {
        // SAFETY: the context is open.
        as_handle(unsafe { sys::ibv_alloc_pd(self.0.context) }, "ibv_alloc_pd").map(Domain)
    }

    fn destroy_domain(&self, domain: Domain) {
        // SAFETY: made by `create_domain`, destroyed once, by the rule for handles.
        unsafe { sys::ibv_dealloc_pd(pointer(domain.0)) };
    }

    unsafe fn register(
        &self,
        domain: Domain,
        base: NonNull<u8>,
        len: u64,
        reach: Reach,
    ) -> Result<Registration, VerbsError> {
        let len = usize::try_from(len).map_err(|_| VerbsError { verb: "ibv_reg_mr", code: 22 })?;
        let flags = access(reach).cast_signed();
        // SAFETY: the domain exists; the memory is the caller's promise.
        let region = unsafe { sys::ibv_reg_mr(pointer(domain.0), base.as_ptr().cast(), len, flags) };
        registration(region, "ibv_reg_mr")
    }

    unsafe fn register_dmabuf(
        &self,
        domain: Domain,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        base: u64,
        len: u64,
        reach: Reach,
    ) -> Result<Registration, VerbsError> {
        let verb = "ibv_reg_dmabuf_mr";
        let len = usize::try_from(len).map_err(|_| VerbsError { verb, code: 22 })?;
        let (fd, flags) = (dmabuf.as_raw_fd(), access(reach).cast_signed());
        // SAFETY: the domain exists; the descriptor is open for the call; the memory is the caller's promise.
        let region = unsafe { sys::ibv_reg_dmabuf_mr(pointer(domain.0), offset, len, base, fd, flags) };
        registration(region, verb)
    }

    fn deregister(&self, registered: Registered) -> Result<(), VerbsError> {
        // SAFETY: made by `register`, and not deregistered before, by the rule for handles.
        checked("ibv_dereg_mr", unsafe { sys::ibv_dereg_mr(pointer(registered.0)) })
    }

    fn create_completions(&self, entries: u32) -> Result<Completions, VerbsError> {
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: the context and the channel are open.
        let queue = unsafe { sys::ibv_create_cq(self.0.context, entries, null_mut(), self.0.channel, 0) };
        as_handle(queue, "ibv_create_cq").map(Completions)
    }

    fn destroy_completions(&self, completions: Completions) {
        // SAFETY: made above, destroyed once, by the rule for handles; its events are acknowledged as they are read.
        unsafe { sys::ibv_destroy_cq(pointer(completions.0)) };
    }

    fn poll(&self, completions: Completions, into: &mut Vec<Completion>) -> Result<bool, VerbsError> {
        let mut entries = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; POLL_MAX];
        let max = c_int::try_from(POLL_MAX).expect("small");
        // SAFETY: the queue exists; the array has the length that is told.
        let count = unsafe { sys::ibv_poll_cq(pointer(completions.0), max, entries.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| VerbsError { verb: "ibv_poll_cq", code: -count })?;
        // SAFETY: the call filled the first `count` entries.
        into.extend(entries[..count].iter().map(|entry| completion(unsafe { entry.assume_init_ref() })));
        Ok(count == POLL_MAX)
    }

    fn notify(&self, completions: Completions) -> Result<(), VerbsError> {
        // SAFETY: the queue exists, by the rule for handles.
        checked("ibv_req_notify_cq", unsafe { sys::ibv_req_notify_cq(pointer(completions.0), 0) })
    }

    fn create_queue_pair(&self, domain: Domain, completions: Completions, depths: Depths) -> Result<Made, VerbsError> {
        let mut inline = depths.inline_len;
        // Fewer bytes inline until the NIC agrees: none says beforehand what it takes.
        let (made, attributes) = loop {
            // SAFETY: all zeros is a valid value; domain and queue exist, by the rule for handles.
            let (made, attributes) = unsafe {
                let mut attributes: sys::ibv_qp_init_attr = zeroed();
                (attributes.send_cq, attributes.recv_cq) = (pointer(completions.0), pointer(completions.0));
                attributes.qp_type = sys::ibv_qp_type::IBV_QPT_RC;
                attributes.cap.max_send_wr = depths.send;
                attributes.cap.max_recv_wr = depths.receive;
                (attributes.cap.max_send_sge, attributes.cap.max_recv_sge) = (1, 1);
                attributes.cap.max_inline_data = inline;
                (sys::ibv_create_qp(pointer(domain.0), &mut attributes), attributes)
            };
            if !made.is_null() || inline == 0 {
                break (made, attributes);
            }
            inline /= 2;
        };
        let handle = QueuePair(as_handle(made, "ibv_create_qp")?);
        // SAFETY: it was just made.
        let number = unsafe { (*made).qp_num };
        self.0.pairs.lock().insert(handle.0);
        if let Err(error) = self.initialise(handle) {
            self.destroy_queue_pair(handle);
            return Err(error);
        }
        Ok(Made { handle, number, inline_len_max: attributes.cap.max_inline_data.min(depths.inline_len) })
    }

    fn connect(&self, queue_pair: QueuePair, path: &Path) -> Result<(), VerbsError> {
        use sys::ibv_qp_attr_mask as field;
        // SAFETY: all zeros is a valid value.
        let mut receive: sys::ibv_qp_attr = unsafe { zeroed() };
        receive.qp_state = sys::ibv_qp_state::IBV_QPS_RTR;
        receive.path_mtu = mtu_code(path.mtu_len);
        (receive.dest_qp_num, receive.rq_psn) = (path.number, path.peer_sequence);
        (receive.max_dest_rd_atomic, receive.min_rnr_timer) = (path.reads_max, NOT_READY_TIMER);
        receive.ah_attr.dlid = path.lid;
        receive.ah_attr.port_num = self.0.port;
        receive.ah_attr.is_global = u8::from(path.gid != [0; 16]);
        receive.ah_attr.grh.dgid = sys::ibv_gid { raw: path.gid };
        (receive.ah_attr.grh.sgid_index, receive.ah_attr.grh.hop_limit) = (path.gid_index, HOP_LIMIT);
        let fields = [
            field::IBV_QP_STATE,
            field::IBV_QP_AV,
            field::IBV_QP_PATH_MTU,
            field::IBV_QP_DEST_QPN,
            field::IBV_QP_RQ_PSN,
            field::IBV_QP_MAX_DEST_RD_ATOMIC,
            field::IBV_QP_MIN_RNR_TIMER,
        ];
        self.modify(queue_pair, &mut receive, &fields)?;
        // SAFETY: all zeros is a valid value.
        let mut send: sys::ibv_qp_attr = unsafe { zeroed() };
        send.qp_state = sys::ibv_qp_state::IBV_QPS_RTS;
        (send.timeout, send.retry_cnt) = (path.ack_timeout_exponent.min(31), RETRIES);
        send.rnr_retry = NOT_READY_RETRIES;
        (send.sq_psn, send.max_rd_atomic) = (path.own_sequence, path.reads_max);
        let fields = [
            field::IBV_QP_STATE,
            field::IBV_QP_TIMEOUT,
            field::IBV_QP_RETRY_CNT,
            field::IBV_QP_RNR_RETRY,
            field::IBV_QP_SQ_PSN,
            field::IBV_QP_MAX_QP_RD_ATOMIC,
        ];
        self.modify(queue_pair, &mut send, &fields)
    }

    fn destroy_queue_pair(&self, queue_pair: QueuePair) {
        self.0.pairs.lock().remove(&queue_pair.0);
        // SAFETY: made by `create_queue_pair`, destroyed once, by the rule for handles; events are acknowledged as they are read.
        unsafe { sys::ibv_destroy_qp(pointer(queue_pair.0)) };
    }

    unsafe fn post_send(&self, queue_pair: QueuePair, requests: &[SendRequest]) -> Result<(), PostedSome> {
        let Scratch { sends, pieces, .. } = &mut *self.0.scratch.lock();
        sends.clear();
        pieces.clear();
        // The places of both lists are final before any of them is pointed to.
        pieces.extend(requests.iter().map(|it| sys::ibv_sge { addr: it.local, length: it.len, lkey: it.local_key }));
        // SAFETY: all zeros is a valid value.
        sends.extend(requests.iter().map(|_| unsafe { zeroed::<sys::ibv_send_wr>() }));
        let (first, first_piece) = (sends.as_mut_ptr(), pieces.as_mut_ptr());
        for (index, request) in requests.iter().enumerate() {
            let entry = &mut sends[index];
            fill_send(request, entry);
            entry.sg_list = first_piece.wrapping_add(index);
            entry.next = if index + 1 < requests.len() { first.wrapping_add(index + 1) } else { null_mut() };
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair exists; the chain ends in the list; memory is the caller's promise.
        let code = unsafe { sys::ibv_post_send(pointer(queue_pair.0), first, &mut bad) };
        if code == 0 { Ok(()) } else { Err(PostedSome { posted: posted(first, bad), code: code.abs() }) }
    }

    unsafe fn post_receive(&self, queue_pair: QueuePair, requests: &[ReceiveRequest]) -> Result<(), PostedSome> {
        let Scratch { receives, pieces, .. } = &mut *self.0.scratch.lock();
        receives.clear();
        pieces.clear();
        pieces.extend(requests.iter().map(|it| sys::ibv_sge { addr: it.local, length: it.len, lkey: it.local_key }));
        let first_piece = pieces.as_mut_ptr();
        receives.extend(requests.iter().enumerate().map(|(index, request)| sys::ibv_recv_wr {
            wr_id: request.id,
            next: null_mut(),
            sg_list: first_piece.wrapping_add(index),
            num_sge: c_int::from(request.len > 0),
        }));
        let first = receives.as_mut_ptr();
        for index in 1..receives.len() {
            receives[index - 1].next = first.wrapping_add(index);
        }
        let mut bad = null_mut();
        // SAFETY: as for `post_send`.
        let code = unsafe { sys::ibv_post_recv(pointer(queue_pair.0), first, &mut bad) };
        if code == 0 { Ok(()) } else { Err(PostedSome { posted: posted(first, bad), code: code.abs() }) }
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.epoll.as_fd()
    }

    fn quiet_wake_fd(&self) {
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel is open and does not block; a queue of an event lives until the event was acknowledged.
        while unsafe { sys::ibv_get_cq_event(self.0.channel, &mut queue, &mut context) } == 0 {
            // SAFETY: as above; one event was read.
            unsafe { sys::ibv_ack_cq_events(queue, 1) };
        }
    }

    fn next_event(&self) -> Option<NicEvent> {
        use sys::ibv_event_type as known;
        let mut event = MaybeUninit::<sys::ibv_async_event>::uninit();
        // SAFETY: the context is open, its descriptor does not block; the event is filled where the call succeeds.
        let mut event = unsafe {
            if sys::ibv_get_async_event(self.0.context, event.as_mut_ptr()) != 0 {
                return None;
            }
            event.assume_init()
        };
        let kind = event.event_type;
        // SAFETY: port events name a port.
        let is_ours = |event: &sys::ibv_async_event| unsafe { event.element.port_num } == c_int::from(self.0.port);
        let told = match kind {
            known::IBV_EVENT_PORT_ACTIVE if is_ours(&event) => NicEvent::PortUp,
            known::IBV_EVENT_PORT_ERR if is_ours(&event) => NicEvent::PortDown,
            known::IBV_EVENT_GID_CHANGE | known::IBV_EVENT_LID_CHANGE => NicEvent::AddressesChanged,
            known::IBV_EVENT_DEVICE_FATAL => NicEvent::DeviceGone,
            known::IBV_EVENT_QP_FATAL
            | known::IBV_EVENT_QP_REQ_ERR
            | known::IBV_EVENT_QP_ACCESS_ERR
            | known::IBV_EVENT_PATH_MIG_ERR => NicEvent::QueuePairFailed,
            other => NicEvent::Other(other as u32),
        };
        // SAFETY: read above, acknowledged once.
        unsafe { sys::ibv_ack_async_event(&mut event) };
        Some(told)
    }
}

fn registration(region: *mut sys::ibv_mr, verb: &'static str) -> Result<Registration, VerbsError> {
    let handle = Registered(as_handle(region, verb)?);
    // SAFETY: the library has just made it.
    let (local_key, remote_key) = unsafe { ((*region).lkey, (*region).rkey) };
    Ok(Registration { handle, local_key, remote_key })
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: opened by `Ibverbs::open`; everything made of them is gone, since its makers hold this.
        unsafe {
            sys::ibv_destroy_comp_channel(self.channel);
            sys::ibv_close_device(self.context);
        }
    }
}
