# Lets the modules of a wheel run on distributions older than the one that builds them: on
# any with glibc 2.28 or newer, whatever glibc the build machine has. make_dist.py has
# auditwheel check this. Today's modules ask for no symbol newer than 2.17, and auditwheel
# tags the wheels accordingly.
#
# A module depends on the machine that links it in two ways. The first is libstdc++, which
# is therefore linked statically. The second is glibc: version 2.34 gave the functions of
# libpthread, libdl and librt new symbol versions when it moved them into libc, and a
# module linked against it asks for those. So modules are linked against stand-ins for
# these libraries, which have the old symbol versions. Any glibc resolves them at run
# time, because newer ones still provide the old versions.

option(JAX_BNAR_MANYLINUX "Build modules that run on any glibc since 2.28" OFF)

# bnar_glibc_stand_in(name soname version function ... version function ...) makes a
# shared library that is linked against but never loaded. The versions are those of
# x86-64; on aarch64 all of these functions have existed since its first version, 2.17.
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

# These are the functions that libstdc++.a and libcudart_static.a call. auditwheel reports
# any that is missing here.
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

# bnar_link_for_manylinux(module stand-in ...) must be called before the module is linked
# to anything else, because the linker takes a function from the first library that
# defines it. For the same reason the linker must not drop a library that nothing before
# it on the command line needs, hence --no-as-needed.
function(bnar_link_for_manylinux module)
  if(JAX_BNAR_MANYLINUX)
    target_sources(${module} PRIVATE "${PROJECT_SOURCE_DIR}/python_module/manylinux.cc")
    list(TRANSFORM ARGN PREPEND bnar_glibc_ OUTPUT_VARIABLE stand_ins)
    target_link_libraries(${module} PRIVATE ${stand_ins})
    target_link_options(${module} PRIVATE
      -static-libstdc++ "LINKER:--exclude-libs,ALL" "LINKER:--no-as-needed")
  endif()
endfunction()
