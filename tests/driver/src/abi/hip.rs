//! libamdhip64.
#![allow(non_snake_case)]

use super::{IpcHandle, bus_id, device_name, export, put, put_text};
use crate::api::{self, Way};
use crate::device::Machine;
use crate::faults::code;
use crate::module::Module;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use zrt_kernels::gpu::driver::Vendor::Amd;

/// Bytes of hipDeviceProp_t as of ROCm 6, and where its fields are.
const PROPERTIES: usize = 1472;
const TOTAL_MEMORY: usize = 288;
const SHARED_PER_BLOCK: usize = 296;
const WARP: usize = 308;
const UNITS: usize = 388;
const ARCH: usize = 1160;

export! {
    fn hipInit(flags: c_uint) {
        if flags == 0 { api::start() } else { Err(code::INVALID_VALUE) }
    }

    fn hipDriverGetVersion(version: *mut c_int) {
        put(version, 60_443_484)
    }

    fn hipRuntimeGetVersion(version: *mut c_int) {
        put(version, 60_443_484)
    }

    fn hipGetDeviceCount(count: *mut c_int) {
        put(count, api::machine(Amd)?.devices.len() as c_int)
    }

    fn hipDeviceGet(device: *mut c_int, index: c_int) {
        put(device, api::device(Amd, index)?.index as c_int)
    }

    fn hipSetDevice(device: c_int) {
        api::set_current(Some(api::device(Amd, device)?.index));
        Ok(())
    }

    fn hipDeviceGetName(name: *mut c_char, room: c_int, device: c_int) {
        let device = api::device(Amd, device)?;
        put_text(name, room.max(0) as usize, &device_name(Amd, device.index))
    }

    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        api::device(Amd, device)?;
        let arch = Machine::get().arch(Amd);
        // Numbers of hipDeviceAttribute_t, which are not CUDA's.
        let answer = match attribute {
            23 => 9,
            63 => arch.units as c_int,
            74 | 75 => arch.shared_bytes as c_int,
            87 => arch.lanes as c_int,
            _ => 0,
        };
        put(value, answer)
    }

    fn hipGetDevicePropertiesR0600(properties: *mut u8, device: c_int) {
        let index = api::device(Amd, device)?.index;
        let machine = Machine::get();
        let arch = machine.arch(Amd);
        if properties.is_null() {
            return Err(code::INVALID_VALUE);
        }
        properties.write_bytes(0, PROPERTIES);
        put_text(properties.cast(), 256, &device_name(Amd, index))?;
        put(properties.add(TOTAL_MEMORY).cast(), machine.memory.capacity())?;
        put(properties.add(SHARED_PER_BLOCK).cast(), u64::from(arch.shared_bytes))?;
        put(properties.add(WARP).cast(), arch.lanes)?;
        put(properties.add(UNITS).cast(), arch.units)?;
        put_text(properties.add(ARCH).cast(), 256, &format!("{}:sramecc+:xnack-", arch.name))
    }

    fn hipDeviceTotalMem(bytes: *mut usize, device: c_int) {
        api::device(Amd, device)?;
        put(bytes, Machine::get().memory.capacity() as usize)
    }

    fn hipDeviceGetPCIBusId(id: *mut c_char, room: c_int, device: c_int) {
        let device = api::device(Amd, device)?;
        put_text(id, room.max(0) as usize, &bus_id(device.index))
    }

    fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        let (device, peer) = (api::device(Amd, device)?.index, api::device(Amd, peer)?.index);
        put(can, c_int::from(device != peer))
    }

    fn hipDeviceSynchronize() {
        api::synchronize_device(Amd)
    }

    fn hipMemGetInfo(free: *mut usize, total: *mut usize) {
        let (have, all) = api::memory_info(Amd)?;
        put(free, have as usize).and_then(|()| put(total, all as usize))
    }

    fn hipMalloc(out: *mut u64, bytes: usize) {
        put(out, api::allocate(Amd, bytes)?)
    }

    fn hipFree(at: u64) {
        api::free(Amd, at)
    }

    fn hipHostMalloc(out: *mut u64, bytes: usize, _flags: c_uint) {
        put(out, api::host_allocate(Amd, bytes)?)
    }

    fn hipHostFree(at: u64) {
        api::host_free(Amd, at)
    }

    fn hipHostRegister(at: u64, bytes: usize, _flags: c_uint) {
        api::register(Amd, at, bytes)
    }

    fn hipHostUnregister(at: u64) {
        api::unregister(Amd, at)
    }

    fn hipMemcpyHtoDAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        api::copy(Amd, to, from, bytes, stream, Way::HostToDevice)
    }

    fn hipMemcpyDtoHAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        api::copy(Amd, to, from, bytes, stream, Way::DeviceToHost)
    }

    fn hipMemcpyDtoDAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        api::copy(Amd, to, from, bytes, stream, Way::DeviceToDevice)
    }

    fn hipMemcpyAsync(to: u64, from: u64, bytes: usize, kind: c_int, stream: u64) {
        let way = match kind {
            1 => Way::HostToDevice,
            2 => Way::DeviceToHost,
            3 => Way::DeviceToDevice,
            4 => Way::AsTheyAre,
            _ => return Err(code::INVALID_VALUE),
        };
        api::copy(Amd, to, from, bytes, stream, way)
    }

    fn hipMemsetD8Async(at: u64, value: u8, count: usize, stream: u64) {
        api::set(Amd, at, [value], count, stream)
    }

    fn hipMemsetD32Async(at: u64, value: c_int, count: usize, stream: u64) {
        api::set(Amd, at, value.to_ne_bytes(), count, stream)
    }

    fn hipStreamCreateWithFlags(out: *mut u64, flags: c_uint) {
        put(out, api::create_stream(Amd, flags)?)
    }

    fn hipStreamDestroy(stream: u64) {
        api::destroy_stream(Amd, stream)
    }

    fn hipStreamSynchronize(stream: u64) {
        api::synchronize_stream(Amd, stream)
    }

    fn hipStreamQuery(stream: u64) {
        api::query_stream(Amd, stream)
    }

    fn hipStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) {
        api::wait_event(Amd, stream, event)
    }

    fn hipEventCreateWithFlags(out: *mut u64, flags: c_uint) {
        put(out, api::create_event(Amd, flags)?)
    }

    fn hipEventDestroy(event: u64) {
        api::destroy_event(Amd, event)
    }

    fn hipEventRecord(event: u64, stream: u64) {
        api::record_event(Amd, event, stream)
    }

    fn hipEventQuery(event: u64) {
        api::event_passed(Amd, event, false)
    }

    fn hipEventSynchronize(event: u64) {
        api::event_passed(Amd, event, true)
    }

    fn hipEventElapsedTime(ms: *mut f32, from: u64, to: u64) {
        put(ms, api::elapsed(Amd, from, to)?)
    }

    fn hipModuleLoadData(out: *mut u64, image: *const c_void) {
        api::current(Amd)?;
        let machine = Machine::get();
        let module = Module::load(Amd, &machine.arch(Amd).name, image)?;
        put(out, machine.modules.add(Arc::new(module)))
    }

    fn hipModuleUnload(module: u64) {
        api::machine(Amd)?.modules.remove(module).map(|_| ())
    }

    fn hipModuleGetFunction(out: *mut u64, module: u64, name: *const c_char) {
        api::current(Amd)?;
        let machine = Machine::get();
        if name.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let name = CStr::from_ptr(name).to_string_lossy();
        let function = machine.modules.get(module)?.function(&name)?;
        put(out, machine.functions.add(Arc::new(function)))
    }

    fn hipModuleLaunchKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: u64,
        params: *const *const c_void,
        _extra: *const *const c_void,
    ) {
        let stream = api::stream(Amd, stream)?;
        let function = Machine::get().functions.get(function)?;
        function.launch([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared_bytes, &stream, params)
    }

    fn hipIpcGetMemHandle(out: *mut [u64; 8], at: u64) {
        put(out, api::share(Amd, at)?)
    }

    fn hipIpcOpenMemHandle(out: *mut u64, handle: IpcHandle, _flags: c_uint) {
        put(out, api::open_shared(Amd, handle.0)?)
    }

    fn hipIpcCloseMemHandle(at: u64) {
        api::close_shared(Amd, at)
    }
}

/// The name of a code.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(error: c_int) -> *const c_char {
    api::describe(error).map_or(c"hipErrorUnknown", |(_, name, _)| name).as_ptr()
}

/// A sentence for a code.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(error: c_int) -> *const c_char {
    api::describe(error).map_or(c"unknown error", |(_, _, text)| text).as_ptr()
}
