// A call of the handler as XLA makes it, on arrays that end where they end: an address sanitizer
// sees every byte read beyond them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* anyfold_chain(XLA_FFI_CallFrame* frame);
extern "C" const char* anyfold_levels();
extern "C" bool anyfold_use_level(const char* name);
extern "C" void anyfold_set_threads(int threads);

// What an error of the handler says.
struct XLA_FFI_Error {
  std::string message;
};

namespace driver {

class Array {
 public:
  Array(XLA_FFI_DataType of, std::vector<int64_t> sizes)
      : of_(of), sizes_(std::move(sizes)), data_(std::aligned_alloc(64, rounded())) {
    // The sanitizer's allocator takes whole lines; what is left of the last one is not ours.
    poison(true);
    std::memset(data_, 0, bytes());
  }
  Array(const Array& other) : Array(other.of_, other.sizes_) {
    std::memcpy(data_, other.data_, bytes());
  }
  ~Array() {
    poison(false);
    std::free(data_);
  }
  Array& operator=(const Array&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void* data() const { return data_; }
  size_t count() const {
    return std::accumulate(sizes_.begin(), sizes_.end(), size_t{1}, std::multiplies<>());
  }
  size_t bytes() const {
    return count() * (of_ == XLA_FFI_DataType_U8 ? 1 : of_ == XLA_FFI_DataType_F16 ? 2 : 4);
  }
  XLA_FFI_DataType of() const { return of_; }

  XLA_FFI_Buffer buffer() {
    return {XLA_FFI_Buffer_STRUCT_SIZE, nullptr,      of_, data_, static_cast<int64_t>(sizes_.size()),
            sizes_.data()};
  }

 private:
  size_t rounded() const { return (bytes() + 64) / 64 * 64; }
  void poison([[maybe_unused]] bool on) const;

  XLA_FFI_DataType of_;
  std::vector<int64_t> sizes_;
  void* data_;
};

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
inline void Array::poison(bool on) const {
  const char* end = static_cast<char*>(data_) + bytes();
  (on ? __asan_poison_memory_region : __asan_unpoison_memory_region)(end, rounded() - bytes());
}
#else
inline void Array::poison(bool) const {}
#endif

// One call of a chain: its code, and what it is given and makes.
struct Call {
  std::vector<int32_t> code;
  std::vector<Array*> given, made;

  // False, with a word why, where the handler says that it failed.
  bool run(int64_t id) {
    XLA_FFI_Api api = {};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
      args->run_id = *reinterpret_cast<int64_t*>(args->ctx);
      return nullptr;
    };
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message};
    };
    std::vector<XLA_FFI_Buffer> buffers;
    buffers.reserve(given.size() + made.size());
    std::vector<void*> places;
    for (const auto* arrays : {&given, &made})
      for (Array* array : *arrays) places.push_back(&buffers.emplace_back(array->buffer()));
    std::vector<XLA_FFI_ArgType> arguments(given.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> results(made.size(), XLA_FFI_RetType_BUFFER);
    XLA_FFI_Array integers = {XLA_FFI_DataType_S32, code.size(), code.data()};
    XLA_FFI_ByteSpan name = {"code", 4}, *names = &name;
    XLA_FFI_AttrType type = XLA_FFI_AttrType_ARRAY;
    void* attributes = &integers;
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&id);
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(given.size()),
                  arguments.data(), places.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(made.size()),
                  results.data(), places.data() + given.size()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 1, &type, &names, &attributes};
    const std::unique_ptr<XLA_FFI_Error> error(anyfold_chain(&frame));
    if (error) std::fprintf(stderr, "%s\n", error->message.c_str());
    return error == nullptr;
  }
};

}  // namespace driver
