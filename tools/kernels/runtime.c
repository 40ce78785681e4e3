/* The rest of a library of kernels: what the code that numba compiled asks of its runtime, and how Python calls it. */

#include <stdint.h>
#include <stdlib.h>

/* Memory of arrays. Compiled code counts references itself, and reads the place of the data: nrtdynmod.py of numba. */
struct array_memory {
    int64_t references;
    void *destructor;
    void *destructor_argument;
    void *data;
    size_t n_bytes;
};

void *NRT_MemInfo_alloc_aligned(size_t n_bytes, uint32_t alignment) {
    size_t head = (sizeof(struct array_memory) + alignment - 1) / alignment * alignment;
    void *place = NULL;
    if (n_bytes > SIZE_MAX - head || posix_memalign(&place, alignment, head + n_bytes) != 0) {
        return NULL;
    }
    struct array_memory *memory = place;
    memory->references = 1;
    memory->destructor = NULL;
    memory->destructor_argument = NULL;
    memory->data = (char *)place + head;
    memory->n_bytes = n_bytes;
    return memory;
}

void NRT_MemInfo_call_dtor(void *memory) {
    free(memory);
}

/* What a capsule of numpy holds, "The array interface protocol" of its manual, and its flags. */
struct array_interface {
    int two;
    int n_dims;
    char kind;
    int itemsize;
    int flags;
    intptr_t *shape;
    intptr_t *strides;
    void *data;
};

enum { CONTIGUOUS = 0x1, ALIGNED = 0x100, IN_NATIVE_ORDER = 0x200, WRITEABLE = 0x400 };

/* What Python gives for one argument, in four bytes: the kind of an array's elements, or 's' for a number. */
struct argument {
    char kind;
    char itemsize;
    char n_dims;
    char is_written;
};

typedef void *capsule_reader(void *capsule, const char *name);
typedef int kernel(const int64_t *words, int64_t *results);

enum { MOST_WORDS = 256, REFUSED = 2 };

/* Call a kernel with the words of its arguments: numbers as they are, arrays as capsules, which are read by
   PyCapsule_GetPointer. Return what the kernel returns, or REFUSED and more for the first argument that is not as
   `arguments` says. */
__attribute__((visibility("default"))) int
mergepipe_call(kernel *called, capsule_reader *read, const struct argument *arguments, int n_arguments,
               const int64_t *given, int64_t *results) {
    int64_t words[MOST_WORDS];
    int n_words = 0;
    for (int i = 0; i < n_arguments; i++) {
        struct argument wanted = arguments[i];
        if (n_words + 1 + wanted.n_dims > MOST_WORDS) {
            return REFUSED + i;
        }
        if (wanted.kind == 's') {
            words[n_words++] = given[i];
            continue;
        }
        struct array_interface *array = read((void *)given[i], NULL);
        int needed = CONTIGUOUS | ALIGNED | IN_NATIVE_ORDER | (wanted.is_written ? WRITEABLE : 0);
        if (array == NULL || array->two != 2 || array->kind != wanted.kind || array->itemsize != wanted.itemsize ||
            array->n_dims != wanted.n_dims || (array->flags & needed) != needed) {
            return REFUSED + i;
        }
        words[n_words++] = (intptr_t)array->data;
        for (int d = 0; d < wanted.n_dims; d++) {
            words[n_words++] = array->shape[d];
        }
    }
    return called(words, results);
}
