#!/usr/bin/env bash
# Writes kernels/src/gpu/driver/hip_sys.rs from the headers of HIP, hipRTC and hipBLASLt as Debian packages them: the oldest that are
# still packaged, since what is in them is in all newer ones. When the archive has moved on, apt says so: put its versions here.
set -euo pipefail
cd "$(dirname "$0")/../.."
script=kernels/bindings/generate.sh
. kernels/bindings/tools.sh

# A package list of its own beside the system's, from the same mirror; nothing is installed.
apt=$work/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$work/packages"
touch "$apt/status"
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 '/debian/$')
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$apt/sources.list"
options=(-qq -o "Dir::State=$apt" -o "Dir::State::status=$apt/status" -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache"
    -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=- -o APT::Architecture=amd64 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
(cd "$work/packages" && apt-get "${options[@]}" download \
    libamdhip64-dev=6.4.3-5 libhipblaslt-dev=7.1.1+dfsg-4 libhipblas-common-dev=7.1.0-1+b1)
for package in "$work"/packages/*.deb; do dpkg -x "$package" "$work/headers"; done
headers=$work/headers/usr/include

hip='hipDeviceArch_t|hip(Init|DriverGetVersion|GetDeviceCount|DeviceGet|DeviceGetName|DeviceGetAttribute|DeviceTotalMem|DeviceGetPCIBusId|SetDevice)'
hip+='|hipGetDevicePropertiesR0600|hipDeviceProp_tR0600|hip(MemGetInfo|Malloc|Free|HostRegister|HostUnregister|HostMalloc|HostFree)'
hip+='|hip(Memcpy(HtoD|DtoH|DtoD)?Async|MemsetD(8|32)Async)'
hip+='|hipStream(CreateWithFlags|Destroy|Synchronize|Query|WaitEvent)|hipEvent(CreateWithFlags|Destroy|Record|Query|Synchronize|ElapsedTime)'
hip+='|hip(ModuleLoadData|ModuleUnload|ModuleGetFunction|ModuleLaunchKernel|DeviceSynchronize|GetErrorName|GetErrorString)'
hip+='|hip(DeviceCanAccessPeer|IpcGetMemHandle|IpcOpenMemHandle|IpcCloseMemHandle)'
hip+='|hip(Success|ErrorOutOfMemory|ErrorNoDevice|ErrorInvalidImage|ErrorNoBinaryForGpu|ErrorNotFound|ErrorNotReady|ErrorLaunchFailure)'
hip+='|hip(ErrorInvalidValue|ErrorInvalidHandle|ErrorHostMemoryAlreadyRegistered|ErrorECCNotCorrectable|ErrorNotSupported)'
hip+='|hip(StreamNonBlocking|EventDisableTiming|EventDefault|EventInterprocess|HostRegisterDefault|HostRegisterPortable|HostMallocPortable|HostMallocDefault)'
hip+='|hipMemcpy(HostToDevice|DeviceToHost|DeviceToDevice|Default)|hipIpcMemLazyEnablePeerAccess'
hip+='|hipDeviceAttribute(WarpSize|ComputeCapabilityMajor|ComputeCapabilityMinor|MultiprocessorCount|MaxThreadsPerBlock|ClockRate)'
hip+='|hipDeviceAttribute(MaxSharedMemoryPerBlock|SharedMemPerBlockOptin|MemoryPoolsSupported|PciBusId|PciDeviceId|PciDomainID|MaxRegistersPerBlock)'
hip+='|hipDeviceAttribute(MemoryClockRate|MemoryBusWidth|L2CacheSize|MaxThreadsPerMultiProcessor|MaxSharedMemoryPerMultiprocessor|Integrated|MaxGridDimX|MaxGridDimY)'
rtc='hiprtc(Version|CreateProgram|CompileProgram|GetProgramLogSize|GetProgramLog|GetCodeSize|GetCode|DestroyProgram|GetErrorString)'
rtc+='|HIPRTC_(SUCCESS|ERROR_COMPILATION)'
lt='hipblasLt(Create|Destroy|GetVersion|MatmulDescCreate|MatmulDescDestroy|MatmulDescSetAttribute|MatrixLayoutCreate|MatrixLayoutDestroy)'
lt+='|hipblasLt(MatrixLayoutSetAttribute|MatmulPreferenceCreate|MatmulPreferenceDestroy|MatmulPreferenceSetAttribute|MatmulAlgoGetHeuristic|Matmul)'
lt+='|hipblasOperation_t|hipblasLtOrder_t|hipblasLtEpilogue_t'
lt+='|HIPBLAS_STATUS_(SUCCESS|NOT_SUPPORTED)|HIPBLAS_OP_(N|T)|HIPBLAS_COMPUTE_32F|HIP_R_(32F|16BF)'
lt+='|HIPBLASLT_MATMUL_DESC_(TRANSA|TRANSB|EPILOGUE|BIAS_POINTER|BIAS_DATA_TYPE|POINTER_MODE)'
lt+='|HIPBLASLT_MATRIX_LAYOUT_(BATCH_COUNT|STRIDED_BATCH_OFFSET|TYPE|ORDER|ROWS|COLS|LD)'
lt+='|HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES|HIPBLASLT_ORDER_(COL|ROW)|HIPBLASLT_EPILOGUE_(DEFAULT|BIAS)'
cat > "$work/headers/hip_all.h" <<'HEADER'
#include <hip/hip_runtime_api.h>
#include <hip/hiprtc.h>
#include <hipblaslt/hipblaslt.h>
HEADER
generate kernels/src/gpu/driver/hip_sys.rs "$work/headers/hip_all.h" "$hip|$rtc|$lt" -x c++ -D__HIP_PLATFORM_AMD__ -I"$headers"

# The numbers of ROCm, machine-readable: what the tests compare with where they find it.
"$python" -m pip install --quiet rocm-bindings-hip==10.0.0.0.1.2 rocm-bindings-libraries==10.0.0.0.1.2 || true
