// A CUDA device without a GPU, for FakeTensorMode in a CPU build of torch: tensors without values can be on it, and
// autograd runs its nodes in a thread of the device's own. Nothing is ever computed, so streams and events do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct Guard : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device getDevice() const override { return {kCuda, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kCuda, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, {kCuda, 0});
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream({kCuda, 0}); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// torch creates the class of this name the first time that it asks for CUDA, which is while it is imported.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace
