//! libcuda.
#![allow(non_snake_case)]

use super::{bus_id, device_name, export, put, put_text};
use crate::api::{self, Way};
use crate::device::Machine;
use crate::faults::code;
use crate::module::Module;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zrt_kernels::gpu::driver::Vendor::Nvidia;

/// Handle of a device's primary context.
fn context(device: usize) -> u64 {
    0xc0de_0000 + device as u64
}

export! {
    fn cuInit(flags: c_uint) {
        if flags == 0 { api::start() } else { Err(code::INVALID_VALUE) }
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, 12_090)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, api::machine(Nvidia)?.devices.len() as c_int)
    }

    fn cuDeviceGet(device: *mut c_int, index: c_int) {
        put(device, api::device(Nvidia, index)?.index as c_int)
    }

    fn cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int) {
        let device = api::device(Nvidia, device)?;
        put_text(name, room.max(0) as usize, &device_name(Nvidia, device.index))
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        let index = api::device(Nvidia, device)?.index;
        let arch = Machine::get().arch(Nvidia);
        let capability: c_int = arch.name.trim_start_matches("sm_").parse().unwrap_or(90);
        // Numbers of CUdevice_attribute.
        let answer = match attribute {
            1 | 2 => 1024,
            3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65_535,
            8 => 48 << 10,
            10 => 32,
            12 => 65_536,
            13 => 1_755_000,
            16 => arch.units as c_int,
            33 => 0x10 + index as c_int,
            34 | 50 => 0,
            36 => 2_619_000,
            37 => 5120,
            39 => 2048,
            40 => 3,
            41 => 1,
            75 => capability / 10,
            76 => capability % 10,
            81 => arch.shared_bytes as c_int + 1024,
            97 => arch.shared_bytes as c_int,
            _ => 0,
        };
        put(value, answer)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        api::device(Nvidia, device)?;
        put(bytes, Machine::get().memory.capacity() as usize)
    }

    fn cuDeviceGetPCIBusId(id: *mut c_char, room: c_int, device: c_int) {
        let device = api::device(Nvidia, device)?;
        put_text(id, room.max(0) as usize, &bus_id(device.index))
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        let (device, peer) = (api::device(Nvidia, device)?.index, api::device(Nvidia, peer)?.index);
        put(can, c_int::from(device != peer))
    }

    fn cuDevicePrimaryCtxRetain(out: *mut u64, device: c_int) {
        put(out, context(api::device(Nvidia, device)?.index))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        api::device(Nvidia, device).map(|_| ())
    }

    fn cuCtxSetCurrent(wanted: u64) {
        let count = api::machine(Nvidia)?.devices.len();
        let index = (0..count).find(|i| context(*i) == wanted);
        if index.is_none() && wanted != 0 {
            return Err(code::INVALID_CONTEXT);
        }
        api::set_current(index);
        Ok(())
    }

    fn cuCtxSynchronize() {
        api::synchronize_device(Nvidia)
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (have, all) = api::memory_info(Nvidia)?;
        put(free, have as usize).and_then(|()| put(total, all as usize))
    }

    fn cuMemAlloc_v2(out: *mut u64, bytes: usize) {
        put(out, api::allocate(Nvidia, bytes)?)
    }

    fn cuMemFree_v2(at: u64) {
        api::free(Nvidia, at)
    }

    fn cuMemHostAlloc(out: *mut u64, bytes: usize, _flags: c_uint) {
        put(out, api::host_allocate(Nvidia, bytes)?)
    }

    fn cuMemFreeHost(at: u64) {
        api::host_free(Nvidia, at)
    }

    fn cuMemHostRegister_v2(at: u64, bytes: usize, _flags: c_uint) {
        api::register(Nvidia, at, bytes)
    }

    fn cuMemHostUnregister(at: u64) {
        api::unregister(Nvidia, at)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) {
        api::copy(Nvidia, to, from, bytes, stream, Way::HostToDevice)
    }

    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) {
        api::copy(Nvidia, to, from, bytes, stream, Way::DeviceToHost)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) {
        api::copy(Nvidia, to, from, bytes, stream, Way::DeviceToDevice)
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        api::copy(Nvidia, to, from, bytes, stream, Way::AsTheyAre)
    }

    fn cuMemsetD8Async(at: u64, value: u8, count: usize, stream: u64) {
        api::set(Nvidia, at, [value], count, stream)
    }

    fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, stream: u64) {
        api::set(Nvidia, at, value.to_ne_bytes(), count, stream)
    }

    fn cuStreamCreate(out: *mut u64, flags: c_uint) {
        put(out, api::create_stream(Nvidia, flags)?)
    }

    fn cuStreamDestroy_v2(stream: u64) {
        api::destroy_stream(Nvidia, stream)
    }

    fn cuStreamSynchronize(stream: u64) {
        api::synchronize_stream(Nvidia, stream)
    }

    fn cuStreamQuery(stream: u64) {
        api::query_stream(Nvidia, stream)
    }

    fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) {
        api::wait_event(Nvidia, stream, event)
    }

    fn cuEventCreate(out: *mut u64, flags: c_uint) {
        put(out, api::create_event(Nvidia, flags)?)
    }

    fn cuEventDestroy_v2(event: u64) {
        api::destroy_event(Nvidia, event)
    }

    fn cuEventRecord(event: u64, stream: u64) {
        api::record_event(Nvidia, event, stream)
    }

    fn cuEventQuery(event: u64) {
        api::event_passed(Nvidia, event, false)
    }

    fn cuEventSynchronize(event: u64) {
        api::event_passed(Nvidia, event, true)
    }

    fn cuEventElapsedTime(ms: *mut f32, from: u64, to: u64) {
        put(ms, api::elapsed(Nvidia, from, to)?)
    }

    fn cuEventElapsedTime_v2(ms: *mut f32, from: u64, to: u64) {
        put(ms, api::elapsed(Nvidia, from, to)?)
    }

    fn cuModuleLoadData(out: *mut u64, image: *const c_void) {
        api::current(Nvidia)?;
        let machine = Machine::get();
        let module = Module::load(Nvidia, &machine.arch(Nvidia).name, image)?;
        put(out, machine.modules.add(Arc::new(module)))
    }

    fn cuModuleUnload(module: u64) {
        api::machine(Nvidia)?.modules.remove(module).map(|_| ())
    }

    fn cuModuleGetFunction(out: *mut u64, module: u64, name: *const c_char) {
        api::current(Nvidia)?;
        let machine = Machine::get();
        if name.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let name = CStr::from_ptr(name).to_string_lossy();
        let function = machine.modules.get(module)?.function(&name)?;
        put(out, machine.functions.add(Arc::new(function)))
    }

    fn cuFuncSetAttribute(function: u64, attribute: c_int, value: c_int) {
        api::current(Nvidia)?;
        let machine = Machine::get();
        let function = machine.functions.get(function)?;
        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
        if attribute == 8 {
            let bytes = u32::try_from(value).ok().filter(|b| *b <= machine.arch(Nvidia).shared_bytes).ok_or(code::INVALID_VALUE)?;
            function.most_shared.store(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    fn cuLaunchKernel(
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
        let stream = api::stream(Nvidia, stream)?;
        let function = Machine::get().functions.get(function)?;
        function.launch([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared_bytes, &stream, params)
    }

    fn cuIpcGetMemHandle(out: *mut [u64; 8], at: u64) {
        put(out, api::share(Nvidia, at)?)
    }

    fn cuIpcCloseMemHandle(at: u64) {
        api::close_shared(Nvidia, at)
    }

    fn cuGetErrorName(error: c_int, out: *mut *const c_char) {
        let (name, _, _) = api::describe(error).ok_or(code::INVALID_VALUE)?;
        put(out, name.as_ptr())
    }

    fn cuGetErrorString(error: c_int, out: *mut *const c_char) {
        let (_, _, text) = api::describe(error).ok_or(code::INVALID_VALUE)?;
        put(out, text.as_ptr())
    }

    fn cuIpcOpenMemHandle_v2(out: *mut u64, handle: super::IpcHandle, _flags: c_uint) {
        put(out, api::open_shared(Nvidia, handle.0)?)
    }
}
