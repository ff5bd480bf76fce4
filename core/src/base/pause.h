#pragma once

namespace hvd {

// Between two looks at a word that another core will change: gives way to the core's other thread.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hvd
