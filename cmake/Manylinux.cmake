# Modules for wheels that run on older distributions than the one that builds them:
# those with glibc 2.28 or newer (the tag manylinux_2_28), whatever this machine has.
#
# Two things of a newer machine get into a module. Its libstdc++ is linked statically.
# And glibc 2.34 gave the functions of libpthread, libdl and librt new versions when it
# moved them into libc: a module linked there asks for them. Stand-ins of these
# libraries, with the old versions, are linked instead. At run time any glibc resolves
# them, for newer ones still have the old versions.

option(JAX_BNAR_MANYLINUX "Build modules that run on any glibc since 2.28" OFF)

# bnar_glibc_stand_in(name soname version function ... version function ...): a shared
# library to link against and never to load. The versions are those of x86-64; on
# aarch64 all of these functions have been there since its first, 2.17.
function(bnar_glibc_stand_in name soname)
  set(source "")
  set(map "")
  foreach(item IN LISTS ARGN)
    if(NOT item MATCHES "^GLIBC_")
      string(APPEND source "void ${item}(void) {}\n")
      string(APPEND map "  ${item};\n")
    elseif(map STREQUAL "")
      if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
        set(item GLIBC_2.17)
      endif()
      set(map "${item} {\n")
    elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
      string(APPEND map "};\n${item} {\n")
    endif()
  endforeach()
  set(stem "${CMAKE_CURRENT_BINARY_DIR}/glibc/${name}")
  file(CONFIGURE OUTPUT ${stem}.cc CONTENT "extern \"C\" {\n${source}}\n" @ONLY)
  file(CONFIGURE OUTPUT ${stem}.map CONTENT "${map}};\n" @ONLY)
  add_library(bnar_glibc_${name} SHARED EXCLUDE_FROM_ALL ${stem}.cc)
  set_target_properties(bnar_glibc_${name} PROPERTIES
    NO_SONAME ON LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/glibc"
    CXX_VISIBILITY_PRESET default)
  target_compile_options(bnar_glibc_${name} PRIVATE -w -fno-builtin)
  target_link_options(bnar_glibc_${name} PRIVATE
    -nostdlib "LINKER:-soname,${soname}" "LINKER:--version-script,${stem}.map")
endfunction()

# What libstdc++.a and libcudart_static.a call. auditwheel finds what is missing here.
if(JAX_BNAR_MANYLINUX)
  bnar_glibc_stand_in(pthread libpthread.so.0 GLIBC_2.2.5
    pthread_condattr_setclock pthread_condattr_setpshared pthread_create pthread_detach
    pthread_getspecific pthread_join pthread_key_create pthread_key_delete pthread_kill
    pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
    pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once
    pthread_rwlock_destroy pthread_rwlock_init pthread_rwlock_rdlock
    pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
    pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock
    pthread_rwlockattr_destroy pthread_rwlockattr_init pthread_rwlockattr_setpshared
    pthread_setspecific pthread_spin_destroy pthread_spin_init pthread_spin_lock
    pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait
    sem_trywait sem_wait)
  bnar_glibc_stand_in(dl libdl.so.2
    GLIBC_2.2.5 dlclose dlerror dlopen dlsym dlvsym GLIBC_2.3.4 dlmopen)
  bnar_glibc_stand_in(rt librt.so.1 GLIBC_2.2.5 shm_open shm_unlink)
endif()

# bnar_link_for_manylinux(module stand-in ...), before the module is linked to anything
# else, for the first library that defines a function is the one that counts; that is
# also why no linker may leave out a library which is not needed where it stands.
function(bnar_link_for_manylinux module)
  if(JAX_BNAR_MANYLINUX)
    target_sources(${module} PRIVATE "${PROJECT_SOURCE_DIR}/native/manylinux.cc")
    list(TRANSFORM ARGN PREPEND bnar_glibc_ OUTPUT_VARIABLE stand_ins)
    target_link_libraries(${module} PRIVATE ${stand_ins})
    target_link_options(${module} PRIVATE
      -static-libstdc++ "LINKER:--exclude-libs,ALL" "LINKER:--no-as-needed")
  endif()
endfunction()
